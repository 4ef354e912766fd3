"""Sharded checkpoints: saved by all ranks, resumed on any number of ranks, converted to a model
folder (FORMAT.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "save_sharded": "save",
    "load_sharded": "load",
    "whole_file": "save_whole",
    "consolidate": "iterate_state_dict get_fp32_state_dict_from_zero_checkpoint "
    "load_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict",
    "convert.export": "convert_checkpoint Conversion",
    "verify": "verify_checkpoint verify_all Verdict",
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from hf_zero.checkpoint.consolidate import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    )
    from hf_zero.checkpoint.consolidate import (
        get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
    )
    from hf_zero.checkpoint.consolidate import iterate_state_dict as iterate_state_dict
    from hf_zero.checkpoint.consolidate import (
        load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
    )
    from hf_zero.checkpoint.convert.export import Conversion as Conversion
    from hf_zero.checkpoint.convert.export import convert_checkpoint as convert_checkpoint
    from hf_zero.checkpoint.load_sharded import load as load
    from hf_zero.checkpoint.save_sharded import save as save
    from hf_zero.checkpoint.verify import Verdict as Verdict
    from hf_zero.checkpoint.verify import verify_all as verify_all
    from hf_zero.checkpoint.verify import verify_checkpoint as verify_checkpoint
    from hf_zero.checkpoint.whole_file import save_whole as save_whole


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_EXPORTS)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
