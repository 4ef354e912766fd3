"""Data parallelism written by hand, right or with one known fault: shows that the comparison can
fail, and when it must.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.oracle import total_norm
from tests.helpers.training import Plan, Session

FAULTS = (
    "sum instead of mean",
    "no division by accumulation",
    "first micro-batch lost",
    "one parameter not reduced",
    "a tied weight counted twice",
    "norm of one rank",
    "clipped to another norm",
    "unused updated by the optimizer",
)


class HandMade(Session):
    """Gradients all-reduced after the last micro-batch, then a plain optimizer step."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, fault: str = ""
    ) -> None:
        self.module, self.optimizer, self.plan, self.fault = model, optimizer, plan, fault
        self.dtype, self.memory, self.micro, self.last_norm = plan.dtype, {}, 0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        (
            loss / (1 if self.fault == "no division by accumulation" else self.plan.accumulation)
        ).backward()
        self.micro += 1
        if self.fault == "first micro-batch lost" and self.micro == 1:
            self.optimizer.zero_grad()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def grads(self) -> dict[str, torch.Tensor]:
        for index, (_, p) in enumerate(self._named()):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if self.fault == "one parameter not reduced" and index == 1:
                continue
            dist.all_reduce(p.grad)
            if self.fault != "sum instead of mean":
                p.grad /= self.plan.ranks
            if self.fault == "a tied weight counted twice" and index == 0:
                p.grad *= 2
        return {name: p.grad.clone() for name, p in self._named() if p.grad is not None}

    def step(self) -> None:
        if self.micro < self.plan.accumulation:
            return
        grads = {name: p.grad for name, p in self._named() if p.grad is not None}
        self.last_norm = total_norm(grads) / (
            self.plan.ranks**0.5 if self.fault == "norm of one rank" else 1
        )
        if self.plan.clip:
            limit = self.plan.clip * (0.9 if self.fault == "clipped to another norm" else 1.0)
            torch.nn.utils.clip_grad_norm_([p for _, p in self._named()], limit)
        if self.fault != "unused updated by the optimizer":
            for _, p in self._named():
                if p.grad is not None and not p.grad.any():
                    p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.micro = 0

    def norm(self) -> float:
        return self.last_norm

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def close(self) -> None:
        self.optimizer.zero_grad()
