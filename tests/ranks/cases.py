"""Shared by the tests of this folder: cases of one test in one item, and the weights of ranks
beside those of a plain loop.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.engines import engine_opener, train_on_threads
from tests.helpers.models import Stack
from tests.helpers.stacks import on_ranks, stack
from tests.helpers.training import At, Driver, Plan, Way, plain_sgd

Test = Callable[..., None]


def over(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Like ``pytest.mark.parametrize``, in one item, which takes less time; each case that fails is
    told by its values. Fixtures are those of all cases.
    """
    own = names.replace(" ", "").split(",")
    cases = [value if len(own) > 1 else (value,) for value in values]

    def decorate(test: Test) -> Test:
        asked = inspect.signature(test).parameters.values()

        @wraps(test)
        def over_all(**given: Any) -> None:
            failed: dict[str, BaseException] = {}
            for case in cases:
                torch.manual_seed(0)
                try:
                    test(**dict(zip(own, case, strict=True)), **given)
                except (Exception, pytest.fail.Exception) as error:
                    failed[repr(case)] = error
            told = [f"{case}: {type(error).__name__}: {error}" for case, error in failed.items()]
            if failed:
                raise AssertionError("\n".join(told)) from next(iter(failed.values()))

        fixtures = [each for each in asked if each.name not in own]
        over_all.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return over_all

    return decorate


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
