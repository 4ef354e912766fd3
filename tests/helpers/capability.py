"""A row of the table of capabilities, and how close its weights are to those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.engines import STAGES, OnEngine
from tests.helpers.models import Stack
from tests.helpers.training import At, Driver, Job, Way

Weights = Mapping[str, torch.Tensor]
Keys = dict[str, Any]

COLUMNS = ("oracle", "bytes", "destroy", "resume", "overflow")


def near(got: Weights, want: Weights, initial: Weights) -> None:
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)


def dropped(got: Weights, want: Weights, initial: Weights) -> None:
    """What is kept is scaled up, which is up to a factor of 2.5 a block for rounding, too."""
    oracle.compare_tensors("weights", got, want, 1e-4, oracle.ADAM_ROUNDING)


def exact(got: Weights, want: Weights, initial: Weights) -> None:
    oracle.compare_tensors("weights", got, want, 0.0, 0.0)


def _off_by(got: Weights, want: Weights, initial: Weights) -> float:
    """Return the error relative to the move: a step moves weights by a hundredth or less."""
    assert got.keys() == want.keys()
    off = oracle.total_norm({name: got[name] - value for name, value in want.items()})
    size = oracle.total_norm({name: value - initial[name] for name, value in want.items()})
    return off / size


def in_16_bits(got: Weights, want: Weights, initial: Weights) -> None:
    """Rounding is wrong by less than a tenth of what the weights have moved; a resume that has lost
    its moments by a third.
    """
    off = _off_by(got, want, initial)
    assert off < 0.2, off


def in_few_bits(got: Weights, want: Weights, initial: Weights) -> None:
    """Int4 blocks of 32 are wrong by a twentieth of what the weights have moved."""
    off = _off_by(got, want, initial)
    assert 1e-4 < off < 0.3, off


def within(limit: float) -> Callable[[Weights, Weights, Weights], None]:
    """Each parameter has moved, and none by more than ``limit``: for steps that are far from those
    of the plain loop, and whose state other tests compare.
    """

    def compare(got: Weights, want: Weights, initial: Weights) -> None:
        assert got.keys() == want.keys()
        for name, value in got.items():
            moved = float((value - initial[name]).abs().max())
            assert 0.0 < moved < limit, f"{name} has moved by {moved:.4g}"

    return compare


@dataclass(frozen=True)
class Row:
    """``job`` is trained by the engine, ``plain`` (the same, if none is given) by the plain loop.

    ``keys`` are those of the configuration, of a stage and a folder; ``plan`` fields of the Plan.
    ``readers``: groups of ranks that read rows of their own, each rank if 0. ``compare`` takes
    weights, those of the plain loop and the initial ones; rows that are not ``traced`` compare
    weights alone. ``elsewhere``: ranks that go on from a checkpoint; 0 where rows depend on the
    rank, which go on on as many. ``columns``: those that apply. ``around`` changes the environment.
    """

    job: Job
    keys: Callable[[int, Path], Keys] = lambda stage, folder: {}
    plain: Job | None = None
    stages: tuple[int, ...] = STAGES
    ranks: int = 2
    readers: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = oracle.FP32_TOLERANCE
    compare: Callable[[Weights, Weights, Weights], None] = near
    traced: bool = True
    elsewhere: int = 3
    columns: tuple[str, ...] = COLUMNS
    session: type[OnEngine] = OnEngine
    around: Callable[[pytest.MonkeyPatch], None] = lambda patch: None

    @property
    def by_hand(self) -> Job:
        return self.plain or self.job

    def only(self, *columns: str) -> Row:
        return replace(self, columns=columns)


class Same(Job):
    """``job``, of which all ranks read the rows of the first."""

    def __init__(self, job: Job) -> None:
        self.job, self.name = job, f"{job.name}, the same rows on all ranks"

    def build(self) -> nn.Module:
        return self.job.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.job.optimizer(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return self.job.loss(net, replace(at, rank=0))


def always(**keys: Any) -> Callable[[int, Path], Keys]:
    return lambda stage, folder: keys


def two_blocks() -> nn.Module:
    return Stack(2)


def stack_with(name: str, make: Callable[[Any], Any]) -> Way:
    return Way(name, two_blocks, make_optimizer=make)


TWO_BLOCKS = Way("two blocks", two_blocks)


class WithoutGradients(OnEngine):
    """Reads no gradients: they are not averaged, or in parts."""

    def grads(self) -> dict[str, torch.Tensor]:
        return {}


def no_compilation(patch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
