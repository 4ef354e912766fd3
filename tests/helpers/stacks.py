"""A small hand-written model on ranks, and the same steps by hand: for tests of one feature at a
time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
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


def layers() -> nn.Sequential:
    """Three linear layers, whose names are 0, 2 and 4."""
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )
    )


def squared(net: Any, at: At, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The loss of one micro-batch."""
    return net(features(at.step, at.micro, at.rank).to(dtype)).float().pow(2).mean()


def run_steps(
    engine: Any,
    rank: int,
    numbers: Iterable[int],
    micros: int = 1,
    after: Callable[[int], Any] = lambda step: None,
) -> list[torch.Tensor]:
    """Train a stack in the steps ``numbers``, of ``micros`` micro-batches each, in the dtype of its
    parameters; ``after`` is called with the number of each. Returns the losses.
    """
    dtype, losses = next(engine.module.parameters()).dtype, []
    for number in numbers:
        for micro in range(micros):
            loss = squared(engine, At(number, micro, rank), dtype)
            engine.backward(loss)
            losses.append(loss.detach())
            del loss  # and with it the graph
            engine.step()
        after(number)
    return losses


def on_ranks(
    world: int, fn: Callable[..., Any], *args: Any, build: Callable[[], nn.Module] = stack
) -> list[Any]:
    """``fn(rank, model, *args)`` on ``world`` threads, each with its own copy of the same model."""
    models = [build() for _ in range(world)]
    return run_ranks(world, lambda rank: fn(rank, models[rank], *args))


def on_each_rank(
    world: int | str, build: Callable[[], nn.Module] = stack, timeout: float = 240.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of ``rank`` (and ``model``, if it asks for one) and of pytest's arguments run on
    ``world`` threads, each with its own copy of the same model. ``world`` may be the name of an
    argument.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(test).parameters
        asked = {name: own[name] for name in own if name not in ("rank", "model")}
        if isinstance(world, str) and world not in asked:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            asked[world] = inspect.Parameter(world, kind)

        @wraps(test)
        def on_threads(**given: Any) -> None:
            count = given[world] if isinstance(world, str) else world
            made = [{"model": build()} if "model" in own else {} for _ in range(count)]
            passed = {name: value for name, value in given.items() if name in own}
            run_ranks(count, lambda rank: test(rank=rank, **made[rank], **passed), timeout=timeout)

        on_threads.__signature__ = inspect.Signature([*asked.values()])  # type: ignore
        return on_threads

    return decorate


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
