"""Construction of models from a configuration under ZeRO-3: directly into shards, as in
zero.Init.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from hf_zero.deepspeed import zero_init
from hf_zero.deepspeed.zero3_context import (
    Loading,
    active_config,
    current_loading,
    log_zero3,
    postponed,
)
from hf_zero.distributed import init, process_group
from hf_zero.loading import Building, record_in


def build_in_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``PreTrainedModel._from_config``: a large model is constructed sharded."""
    # it holds references to torch's init functions, which a model's _init_weights calls
    if "transformers.initialization" in sys.modules:
        record_in(sys.modules["transformers.initialization"].TORCH_INIT_FUNCTIONS)

    def _from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = active_config()
        if (
            config is None
            or postponed.get() is not None
            or current_loading.get() is not None
            or torch.get_default_device().type == "meta"
        ):
            return original(cls, *args, **kwargs)
        init.init_from_config(config)
        log_zero3()
        token = current_loading.set(Loading(shards=False))
        try:
            if process_group.get_world_size() == 1:
                model = original(cls, *args, **kwargs)
                zero_init.give_facts(model.parameters())
                return model
            building = Building(zero_init.WHOLE_BYTES)
            with building:
                model = original(cls, *args, **kwargs)
            zero_init.hold_roots(building.roots, config)
            return model
        finally:
            current_loading.reset(token)

    return _from_config
