"""Each operation costs in proportion to the parameters and the blocks of a model.

Calls of functions, of C too, are counted.
"""

from __future__ import annotations

import gc
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint.convert.export import convert_checkpoint
from tests.helpers.engines import config_of
from tests.helpers.stacks import on_ranks

EXPONENT = 1.05
FEW, TIMES, WIDTH = 40, 4, 4


class Experts(nn.Module):
    """Modules of which a forward uses one in each layer, the first by default."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(experts // 5)) for _ in range(5)
        )

    def forward(self, x: torch.Tensor, index: int = 0) -> torch.Tensor:
        for layer in self.layers:
            x = cast(nn.ModuleList, layer)[index](x)
        return x


def operations(size: int, folder: Path) -> Any:
    """Yield the name of each operation and what carries it out."""
    model, engine = Experts(size), cast(Any, None)

    def initialize() -> None:
        nonlocal engine
        optimizer = torch.optim.AdamW(model.parameters())
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(3))[0]

    def step() -> None:
        engine.backward(engine(torch.ones(4, WIDTH)).square().mean())
        engine.step()

    yield "initialize", initialize
    yield "first step", step
    step()
    yield "step", step
    yield "state_dict", engine.state_dict
    yield "state_dict(rank0_only=True)", lambda: engine.state_dict(rank0_only=True)
    yield "save_checkpoint", lambda: engine.save_checkpoint(folder, tag="a")
    yield (
        "save_checkpoint(blocking=False)",
        lambda: engine.save_checkpoint(folder, "b", blocking=False),
    )
    engine.save_checkpoint(folder, tag="c")
    yield "load_checkpoint", lambda: engine.load_checkpoint(folder, tag="a")
    yield "convert", lambda: convert_checkpoint(folder, folder / "out", tag="a", progress=False)
    yield "destroy", engine.destroy


def operations_of_a_mixture(size: int, folder: Path, by_parameter: bool = False) -> Any:
    """As :func:`operations`, of an engine whose parameters were used in different steps;
    ``by_parameter``: each in another number of steps.
    """
    model = Experts(size)
    optimizer = torch.optim.AdamW(model.parameters())
    sharding = {"stage": 2, "stage3_module_granularity_threshold": 0}  # a unit for each module
    config = config_of(2, zero_optimization=sharding)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(index: int) -> None:
        engine.backward(engine(torch.ones(4, WIDTH), index).square().mean())
        engine.step()

    for index in range(size // 5):
        step(index)
    if by_parameter:
        numbers = {name: {"step": 1.0 + n} for n, name in enumerate(engine.bound.group_of)}
        engine.bound.state.scalars.load(numbers)
        assert (
            len({of["step"] for of in engine.bound.state.scalars.of_parameters().values()})
            == 2 * size
        )
    yield "step", lambda: step(0)
    packed = optimizer.state_dict()
    yield "optimizer.state_dict", optimizer.state_dict
    yield "optimizer.load_state_dict", lambda: optimizer.load_state_dict(packed)
    engine.save_checkpoint(folder, tag="a")
    yield "save_checkpoint", lambda: engine.save_checkpoint(folder, tag="b")
    yield "load_checkpoint", lambda: engine.load_checkpoint(folder, tag="a")
    engine.destroy()


def measured(size: int, folder: Path, of: Any = operations) -> dict[str, int]:
    """Return the calls of each operation ``of`` a model of ``size``."""

    def run(rank: int, model: nn.Module) -> dict[str, int]:
        found, calls = {}, 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for what, call in of(size, folder / f"{size}"):
            calls = 0
            sys.setprofile(count)
            try:
                call()
            finally:
                sys.setprofile(None)
            found[what] = calls
        return found

    gc.collect()
    gc.disable()  # its share grows with what else lives in this process
    try:
        return on_ranks(1, run)[0]
    finally:
        gc.enable()


EACH = partial(operations_of_a_mixture, by_parameter=True)


@pytest.mark.parametrize("of", [operations, operations_of_a_mixture, EACH])
def test_four_times_the_model_costs_four_times(of: Any, tmp_path: Path) -> None:
    measured(10, tmp_path, of)  # imports, and what is kept for later
    few, many = (measured(FEW * by, tmp_path, of) for by in (1, TIMES))
    for what, calls in many.items():
        grown = math.log(calls / few[what], TIMES)
        assert grown <= EXPONENT, f"{what}: {few[what]} calls, then {calls}"
