"""The names that TRL uses around generation at stage 3.

TRL removes the engine's hooks inside GatheredParameters and restores them. hf-zero's hooks may
stay: a unit that is gathered already is neither gathered again nor released by them. So the names
exist, without hooks to remove.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from hf_zero.integrations.engine_protocol import EngineProtocol


class ParameterCoordinator:
    """Coordinator without a trace of a forward pass that generation could make stale: a changed
    order is recorded anew.
    """

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """No-op: there is no trace."""


class ParameterOffload:
    """What TRL reads of DeepSpeed's hooks: the module that has them, and the hooks to remove, none.

    It stays on the script's optimizer, so it does not keep the module alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.forward_hooks: list[object] = []
        self.backward_hooks: list[object] = []
        self.param_coordinator = ParameterCoordinator()

    @property
    def module(self) -> nn.Module | None:
        """The module of the engine, while it lives."""
        return self._module()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """No-op: the hooks were never removed."""


def no_external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """Replacement of ``module.ds_external_parameters()``, always empty: a unit gathers what its
    modules use, whichever module owns it.
    """
    return iter(())


def add_trl_names(engine: EngineProtocol) -> None:
    """Set the names on the optimizer and on the module of ``engine``, where TRL reads them."""
    engine.optimizer.parameter_offload = ParameterOffload(engine.module)
    vars(engine.module)["ds_external_parameters"] = no_external_parameters
