"""What TRL handles around generation at stage 3: it takes the engine's hooks off inside
GatheredParameters, and puts them back.

hf-zero's hooks may stay: a unit that is gathered already is neither gathered again nor released
under them. So the names are there, and there is nothing behind them to take off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class ParameterCoordinator:
    """Keeps no trace of a forward pass that generation could make stale: an order that changes
    is recorded anew.
    """

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """There is no trace to drop."""


class ParameterOffload:
    """``engine.optimizer.parameter_offload``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = ParameterCoordinator()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """The hooks were never off."""


def no_external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """``module.ds_external_parameters()``: a unit gathers what its modules use, wherever it is
    owned.
    """
    return iter(())


def offer_offload_names(engine: Any) -> None:
    """Let ``engine`` carry the names that TRL handles."""
    engine.optimizer.parameter_offload = ParameterOffload(engine.module)
    engine.module.ds_external_parameters = no_external_parameters
