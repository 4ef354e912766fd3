"""The warning of ranks that all train on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import layers

SGD = {"type": "SGD", "params": {"lr": 0.1}}
# a batch by rank and step, and whether ranks are warned
CASES: dict[str, tuple[Callable[[int, int], int], bool]] = {
    "equal": (lambda rank, step: step, True),
    "the same in all steps": (lambda rank, step: 0, True),
    "of each rank": (lambda rank, step: 10 * rank + step, False),
    "equal in the first step": (lambda rank, step: step * rank, False),
    "equal from the second step on": (lambda rank, step: step or rank, False),
    "equal on half of the ranks": (lambda rank, step: 10 * (rank // 2) + step, False),
    "equal on every second rank": (lambda rank, step: 10 * (rank % 2) + step, False),
}


class Sum(nn.Module):
    """A model that takes a seed, or a tensor."""

    tp_plan = {"layers.0": "colwise", "layers.2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor | None = None, seed: int = 0) -> torch.Tensor:
        drawn = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        return self.layers(drawn if x is None else x).square().mean()


def told(heard: list[str]) -> list[str]:
    return [text for text in heard if "ranks have trained on the same batches in the first" in text]


def train(
    engine: Any, rank: int, batch: Callable[[int, int], Any], steps: int = 3, micros: int = 1
) -> None:
    for step in range(steps):
        for _ in range(micros):
            given = batch(rank, step)
            engine.backward(engine(**given) if isinstance(given, dict) else engine(given))
            engine.step()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))


@in_turn(
    "stage, replicas, case",
    [(stage, 1, "equal") for stage in (0, 1, 2, 3)]
    + [(3, 2, case) for case in CASES]
    + [(0, 1, case) for case in CASES],
)
def test_ranks_with_equal_batches_are_told_once(
    stage: int, replicas: int, case: str, heard: list[str]
) -> None:
    heard.clear()
    choose, warns = CASES[case]
    models = [Sum() for _ in range(4)]

    def run(rank: int) -> None:
        config = config_of(stage, optimizer=SGD, gradient_accumulation_steps=2)
        if replicas > 1:
            config["replicate_size"] = replicas
        engine = hf_zero.initialize(model=models[rank], config=config)[0]
        train(engine, rank, lambda *at: rows(choose(*at)), micros=2)

    run_ranks(4, run)
    assert len(told(heard)) == warns, heard


KINDS = (
    "evaluation, no tensor, a number beside it, one rank, shared sequences, a loader that divides"
)


@in_turn("kind", KINDS.split(", "))
def test_batches_that_are_not_compared(kind: str, heard: list[str]) -> None:
    """Equal tensors of an evaluation or beside other numbers, and batches that ranks share."""
    heard.clear()
    ranks = 1 if kind == "one rank" else 2
    models = [Sum() for _ in range(ranks)]

    def run(rank: int) -> None:
        config = config_of(1, optimizer=SGD)
        if kind == "shared sequences":
            config["tensor_parallel"] = {"autotp_size": 2}
        engine = hf_zero.initialize(model=models[rank], config=config)[0]
        if kind == "evaluation":
            with torch.no_grad():
                engine(rows(0))
            engine.eval()(rows(0))
            engine.train()
        if kind == "a loader that divides":
            engine.optimizer_step.agreement.batches.trust_loader()
        given: dict[str, Callable[[int, int], Any]] = {
            "evaluation": lambda rank, step: rows(rank),
            "no tensor": lambda rank, step: {"seed": step},
            "a number beside it": lambda rank, step: {"x": rows(0), "seed": rank},
        }
        train(engine, rank, given.get(kind, lambda rank, step: rows(step)))

    run_ranks(ranks, run)
    assert not told(heard)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_of_each_kind_have_codes(dtype: torch.dtype, heard: list[str]) -> None:
    models = [Sum(), Sum()]

    def run(rank: int) -> None:
        engine = hf_zero.initialize(models[rank], config_of(2, optimizer=SGD))[0]
        whole = torch.ones(300, 400).to(dtype).T
        others = (whole, whole.conj(), torch.empty(0), torch.empty(2, device="meta"))
        for _ in range(3):
            engine.optimizer_step.agreement.batches.record(others)
            engine.backward(engine(rows(rank)))
            engine.step()

    run_ranks(2, run)
    assert len(told(heard)) == 1
