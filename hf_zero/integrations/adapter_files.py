"""What PEFT writes of a model in shards: every adapter it has, trained or not, by rank 0 alone.

For a PEFT model at stage 3 the Trainer collects only what trains, and PEFT then writes every adapter out of that: a frozen
one (a reference beside the one in training) would become a file without tensors, and a resized embedding would be left
out. PEFT also asks its modules for their names through ``state_dict()``, which gathers, on the one rank that writes.
Imported in the middle of ``import peft``: anything of PEFT is imported inside the functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn

from hf_zero.core.gathered import GatheredParameters
from hf_zero.core.parameter import owner_of
from hf_zero.integrations import finder


def name_without_gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """A module that is saved whole finds its names in the state dict that it is given (``ModulesToSaveWrapper.adapter_state_dict``)."""

    def adapter_state_dict(self: Any, adapter_name: str, state_dict: dict[str, Any]) -> dict[str, Any]:
        flats = [owner_of(parameter) for parameter in self.parameters()]
        if not (finder.chosen() and any(flat is not None and flat.sharded for flat in flats)):
            return original(self, adapter_name, state_dict)
        prefix = f"modules_to_save.{adapter_name}."
        return {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}

    return adapter_state_dict


@contextmanager
def all_adapters(engine: Any, model: nn.Module) -> Iterator[None]:
    """What ``engine`` consolidates without the frozen parameters holds those that PEFT writes, all the same."""
    frozen = [name for name in _written(model) if not owner_of(model.get_parameter(name)).trainable] if _has_adapters(model) else []
    if not frozen:
        yield
        return
    consolidated = engine._zero3_consolidated_16bit_state_dict

    def with_frozen_adapters(exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        state = consolidated(exclude_frozen_parameters)
        for _, names in groupby(frozen, lambda name: owner_of(model.get_parameter(name)).unit):
            parameters = {name: model.get_parameter(name) for name in names}
            with GatheredParameters(parameters):
                if state is not None:
                    state.update({name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()})
        return state

    engine._zero3_consolidated_16bit_state_dict = with_frozen_adapters
    try:
        yield
    finally:
        del engine._zero3_consolidated_16bit_state_dict


def _has_adapters(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")  # not imported: then nothing is of PEFT
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    # Learned prompts are not taken from a state dict.
    return not any(config.is_prompt_learning for config in model.peft_config.values())


def _written(model: Any) -> list[str]:
    """Names of the parameters that ``save_pretrained`` writes, in the model's order: PEFT is asked, with tensors without values."""
    from peft import get_peft_model_state_dict

    shells = {
        name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    chosen = {
        id(value) for adapter in model.peft_config for value in get_peft_model_state_dict(model, shells, adapter_name=adapter).values()
    }
    return [name for name, shell in shells.items() if id(shell) in chosen]
