"""A training of another library's engine, as a recorder reads it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed import process_group
from hf_zero.logging import JsonObject
from hf_zero.parity.sketch import sketch


class Observed:
    """The model and the optimizer that another library trains, with the figures of its last step.

    ``config``: the precision and stage of that library.
    """

    def __init__(self, module: nn.Module, optimizer: Any, config: ZeroConfig):
        self.module, self.optimizer, self.config = module, optimizer, config
        self.global_rank = process_group.get_rank()
        self.global_steps = 0
        self.norm: float | None = None
        self.applied, self.scale = True, 1.0

    def get_global_grad_norm(self) -> float | None:
        return self.norm

    def was_step_applied(self) -> bool:
        return self.applied

    def loss_scale(self) -> float:
        return self.scale

    def sketches(self, frozen: bool = False) -> JsonObject:
        """Return sketches of the parameters that train, or of all."""
        masters = {
            name: [0, parameter.numel(), *sketch(parameter.detach().reshape(-1), name)]
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad or frozen
        }
        return {"masters": masters, "whole": {}}

    def sizes(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self.module.named_parameters()}
