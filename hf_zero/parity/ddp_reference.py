"""The reference engine over torch's DistributedDataParallel, for loops that call ``initialize``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.config import ZeroConfig
from hf_zero.parity.deepspeed_reference import DeepSpeedReference
from hf_zero.parity.driven_reference import DrivenReference

if TYPE_CHECKING:
    _Averaging = DrivenReference
else:
    _Averaging = object


class AveragedByDDP(_Averaging):
    """Methods of a reference in which DistributedDataParallel averages the gradients: of the window
    in fp32, of each micro-batch in 16 bits, whose sum is kept in fp32.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig
    ):
        super().__init__(module, optimizer, config)
        trains = optimizer is not None and self.world_size > 1
        # in a tuple: not a second child with the same parameters
        self._ddp = (
            (DistributedDataParallel(module, find_unused_parameters=True),) if trains else ()
        )

    def call_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (self._ddp and torch.is_grad_enabled()):
            return super().call_module(args, kwargs)
        (ddp,) = self._ddp
        averages = bool(self.masters) or (self.ends_window and self._syncs)
        with nullcontext() if averages else ddp.no_sync():
            return ddp(*args, **kwargs)

    @torch.no_grad()
    def _average(self, weight: float = 1.0) -> None:
        if not self._ddp:
            super()._average(weight)
            return
        grads = self._local if self.masters else {p: p.grad for p in self.trained}
        factor = weight * (1 if self._averages else self.world_size)
        for parameter in self.trained:
            gradient = grads.get(parameter)
            if gradient is None:
                continue
            master = self.masters.get(parameter)
            if master is None:
                gradient *= factor
            elif master.grad is None:
                master.grad = gradient * factor
            else:
                master.grad += gradient * factor
        self._local, self._averaged = {}, True


class DDPReference(AveragedByDDP, DrivenReference):
    """A :class:`DrivenReference` over DistributedDataParallel."""


class DDPDeepSpeedReference(AveragedByDDP, DeepSpeedReference):
    """A :class:`DeepSpeedReference` over DistributedDataParallel."""
