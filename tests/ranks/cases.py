"""Weights of ranks beside those of a plain loop, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.engines import engine_opener, train_on_threads
from tests.helpers.models import Stack
from tests.helpers.stacks import on_ranks, stack
from tests.helpers.training import At, Driver, Plan, Way, plain_sgd


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def expect(
    want: Mapping[str, torch.Tensor],
    run: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    build: Callable[[], nn.Module] = stack,
    **limits: float,
) -> None:
    """Compare what ``run(rank, model, *args)`` returns on each rank with ``want``."""
    for found in on_ranks(ranks, run, *args, build=build):
        oracle.compare_tensors("weights", found, want, **limits)


_count = itertools.count()


def trains_alike(
    micro: Callable[[Driver, At], torch.Tensor],
    stage: int,
    plan: Plan | None = None,
    make: Callable[[], nn.Module] = Stack,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = plain_sgd,
    **config: Any,
) -> None:
    """``micro(net, at)``, a forward and a backward, trains alike on ranks and in a plain loop."""
    job, plan = Way(f"loop {next(_count)}", make, micro_of=micro), plan or Plan(2, 3)
    job.make_optimizer = optimizer
    oracle.accept(train_on_threads(job, plan, engine_opener(stage, **config)), job, plan, stage)
