"""Transformers under ZeRO: hf-zero's own classes for the Trainer, and wrappers of Transformers.

The classes are imported on first use: modules of this package are imported while ``import
transformers`` runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.integrations.transformers.training_arguments import TrainingArguments
    from hf_zero.integrations.transformers.zero_callback import ZeroCallback

__all__ = ["TrainingArguments", "ZeroCallback"]

_HOMES = {"TrainingArguments": "training_arguments", "ZeroCallback": "zero_callback"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
