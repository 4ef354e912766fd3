"""``wall_clock_breakdown``: what is measured, when it is logged, and that nothing is without it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.zero.step import step_times
from tests.helpers.engines import config_of, start
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw


@pytest.fixture
def waited(monkeypatch):
    """The devices that were waited for; each look at the clock is a second after the last."""
    devices = []
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    seconds = count()
    monkeypatch.setattr(step_times, "time", clock)
    monkeypatch.setattr(step_times, "kinds", SimpleNamespace(synchronize=devices.append))
    return devices


def run(steps, **more):
    model = stack()
    engine = start(model, adamw(model), config_of(2, Plan(accumulation=2), **more))
    for step in range(steps):
        for micro in range(2):
            engine.backward(squared(engine, At(step, micro, 0)))
            engine.step()
    return engine


@pytest.mark.parametrize("every", [2, None, float("inf")])
def test_times_of_parts_and_when_they_are_logged(waited, heard_in_full, every):
    engine = run(3, wall_clock_breakdown=True, steps_per_print=every)
    second = dict.fromkeys(("fwd", "bwd", "step"), 1e3)
    assert engine.step_times.micro_batch == second
    assert engine.step_times.window == dict.fromkeys(second, 2000.0)
    assert waited == [torch.device("cpu")] * (2 * 3 * 6)  # before and after three parts, six times
    timers = DeepSpeedEngine.get_wall_clock_timers(engine)
    assert timers == {
        **{f"{part}_microstep": 1e3 for part in second},
        **dict.fromkeys(second, 2000.0),
    }
    said = [line for line in heard_in_full if "time (ms)" in line]
    parts = "fwd: 2000.00 | bwd: 2000.00 | step: 2000.00"
    if every == 2:
        assert said == [f"step 2: time (ms) | {parts}, means of 2 steps"]
    else:
        assert said == [f"step {step}: time (ms) | {parts}, means of 1 steps" for step in (1, 2, 3)]
    engine.destroy()


def test_nothing_is_measured_without_the_key(waited, heard_in_full):
    engine = run(1, steps_per_print=1)
    assert waited == [] and DeepSpeedEngine.get_wall_clock_timers(engine) == {}
    assert not any("time (ms)" in line for line in heard_in_full)
    engine.destroy()


def test_rank_0_alone_logs(heard_in_full):
    def on_rank(rank, model):
        config = config_of(3, wall_clock_breakdown=True)
        engine = start(model, adamw(model), config)
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        assert min(engine.step_times.window.values()) > 0

    on_ranks(2, on_rank)
    assert sum("time (ms)" in line for line in heard_in_full) == 1
