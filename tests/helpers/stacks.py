"""A small hand-written model on ranks, and the same steps by hand: for tests of one feature at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.helpers.models import Stack, features, seeded
from tests.helpers.oracle import total_norm
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At

# per step: (weight of the loss, seed of the micro-batch)
Windows = Sequence[Sequence[tuple[float, int]]]


def stack() -> nn.Module:
    return seeded(Stack)


def squared(net: Any, at: At, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The loss of one micro-batch."""
    return net(features(at.step, at.micro, at.rank).to(dtype)).float().pow(2).mean()


def on_ranks(
    world: int, fn: Callable[..., Any], *args: Any, build: Callable[[], nn.Module] = stack
) -> list[Any]:
    """``fn(rank, model, *args)`` on ``world`` threads, each with its own copy of the same model."""
    models = [build() for _ in range(world)]
    return run_ranks(world, lambda rank: fn(rank, models[rank], *args))


def by_hand(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    windows: Windows,
    ranks: int,
    clip: float = 0.0,
    after_step: Callable[
        [int, nn.Module, torch.optim.Optimizer], None
    ] = lambda step, model, optimizer: None,
    build: Callable[[], nn.Module] = stack,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms after one plain process has run ``windows``; losses are
    averaged over ranks, weighted in time.
    """
    model = build()
    optimizer, norms = optimizer_of(model), []
    for step, window in enumerate(windows):
        optimizer.zero_grad()
        for rank in range(ranks):
            for weight, micro in window:
                (squared(model, At(step, micro, rank)) * (weight / ranks)).backward()
        grads = {
            name: p.grad if p.grad is not None else torch.zeros_like(p)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        norms.append(total_norm(grads))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after_step(step, model, optimizer)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms
