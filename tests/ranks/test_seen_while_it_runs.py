"""The lines that a run writes by itself: a summary at the start, one for each save and load, one
every ``steps_per_print`` steps, or by time, once for all ranks; the profile and the debug log of
a step, ``wall_clock_breakdown``, and the cost of each while it is off.
"""

from __future__ import annotations

import logging
import math
import re
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

import hf_zero
from hf_zero.config.sourced import SourcedDict
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.device import spans
from hf_zero.logging import asked_in, logger
from hf_zero.measures import figures, stopwatch
from hf_zero.measures.step import EngineMeasures
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, stack
from tests.helpers.training import Plan, adamw

BYTES = r"[\d.,]+ (?:B|kB|MB|GB|TB)"
START = [
    r"Stack: [\d,]+ parameters, all trainable, in fp32; stage 3 on 2 ranks of 1 host",
    r"  \d units \(modules that are gathered and reduced together\)",
    rf"  memory: {BYTES} predicted, excluding activations; {BYTES} free.*",
    r"  kernels: off \(default\); `kernels: auto` runs those that are fast on this device",
    r"  resolved configuration .*",
]


def begun(model, config, **more):
    made = torch.optim.AdamW(model.parameters())
    return hf_zero.initialize(model, config, optimizer=made, **more)[0]


def step(engine):
    engine.backward(engine(torch.ones(3, 7)).square().mean())
    engine.step()


@pytest.fixture
def told(heard_in_full, monkeypatch):
    """The messages of hf-zero's logger, of all ranks."""
    monkeypatch.setenv("RANK", "0")
    return heard_in_full


def test_a_run_says_what_it_is_about_to_do_and_does(told, tmp_path):
    config = {
        "$schema": "schema.json",
        "stage": 3,
        "optimizer": {"type": "AdamW"},
        "steps_per_print": 2,
        "checkpoint": {"folder": str(tmp_path)},
        "zero_optimization": {"round_robin_gradients": True},
    }

    def train(rank, model):
        engine, *_ = hf_zero.initialize(model, config)
        for _ in range(2):
            step(engine)
        engine.save_checkpoint()
        engine.load_checkpoint()
        engine.destroy()

    on_ranks(2, train)
    (start,) = [each for each in told if "resolved configuration" in each]
    lines = start.splitlines()
    for expected, line in zip(START, lines):
        assert re.fullmatch(expected, line), line
    written = lines[len(START) :]
    assert all(line.startswith("    ") for line in written) and "$schema" not in start
    assert sum("config dict: " in line for line in written) == 1
    assert "    without effect in hf-zero:" in written
    assert any("round_robin_gradients: it concerns" in line for line in written)
    (line,) = [each for each in told if each.startswith("step ")]
    figures = r"loss \S+, learning_rate 0.001, grad_norm \S+, samples/s \S+, ms/step \S+"
    assert re.fullmatch(rf"step 2: {figures}, model state {BYTES}", line)
    (saved,) = [each for each in told if each.startswith("saved ")]
    size = re.fullmatch(rf"saved {tmp_path}/global_step2: ([\d.]+) (\w+) in \d+\.\d\d s", saved)
    shown = float(size[1]) * {"B": 1, "kB": 1e3, "MB": 1e6}[size[2]]
    files = sum(path.stat().st_size for path in (tmp_path / "global_step2").iterdir())
    assert shown == pytest.approx(files, rel=0.05), "the manifest itself is left out"
    loaded = {each for each in told if each.startswith("loaded ")}
    what = rf"{tmp_path}/global_step2, of 2 ranks at stage 3: {BYTES} on this rank in \d+\.\d\d s"
    assert loaded and all(re.fullmatch(f"loaded {what}", each) for each in loaded)


def written_by_accelerate():
    config = SourcedDict({"stage": 2, "steps_per_print": math.inf})
    return config.remember({"stage": (2, "config file zero2.json")}, "Accelerate")


# (configuration, seconds between lines, a bar is shown, a trainer shows them, steps with a line)
CASES = [
    (lambda: {"stage": 3}, 30, False, False, [1]),
    (lambda: {"stage": 1}, 0, False, False, [1, 2, 3]),
    (written_by_accelerate, 30, False, False, [1]),
    (lambda: {"stage": 2, "steps_per_print": math.inf}, 0, False, False, []),
    (lambda: {"stage": 2}, 0, True, False, []),
    (lambda: {"stage": 2}, 0, False, True, []),
    (lambda: {"stage": 2, "steps_per_print": 2}, 0, True, True, [2]),
    (lambda: {"stage": 2, "metrics": {"enabled": True}}, 0, False, False, [1, 2, 3]),
    (lambda: {"stage": 2, "log_level": "warning"}, 0, False, False, []),
]


@in_turn("make, seconds, bar, elsewhere, steps", CASES)
def test_lines_by_time(make, seconds, bar, elsewhere, steps, told, monkeypatch):
    """Of rank 0, unless a bar, a trainer or the script shows figures."""
    told.clear()
    monkeypatch.setattr(figures, "SECONDS", seconds)
    config = make()
    measured = "metrics" in config or config.get("steps_per_print", math.inf) != math.inf

    def run(rank, model):
        engine, losses = begun(model, make()), []
        if elsewhere:
            engine.measures.shown_elsewhere()
        with tqdm(total=3) if bar and rank == 0 else nullcontext():
            for number in range(3):
                loss = engine(torch.full((2, 7), 1.0 + rank + number)).square().mean()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        assert rank == 0 or measured or not isinstance(engine.measures, EngineMeasures)
        engine.destroy()
        return losses

    losses, others = on_ranks(2, run)
    lines = [each for each in told if re.match(r"step \d+: ", each)]
    assert [int(each.split()[1].strip(":")) for each in lines] == steps
    for number, line in zip(steps, lines):
        own = re.search(r"loss (\S+?)( \(rank 0's batches only\))?, ", line)
        assert own is not None and bool(own[2]) == (not measured)
        whole = (losses[number - 1] + others[number - 1]) / 2
        assert float(own[1]) == pytest.approx(whole if measured else losses[number - 1], rel=1e-4)
        for figure in ("learning_rate", "grad_norm", "samples/s", "ms/step", "model state"):
            assert figure in line


BLOCKS = 3


def build():
    return seeded(lambda: Stack(BLOCKS))


def trained(model, steps=1, rank=0, **more):
    engine = start(model, adamw(model), config_of(3, **more))
    run_steps(engine, rank, range(steps))
    return engine


@pytest.fixture
def lines():
    """Collect the messages at the level of the debug log."""
    heard: list[str] = []

    class Ears(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    ears, level = Ears(logging.DEBUG), logger.level
    logger.addHandler(ears)
    yield heard
    logger.removeHandler(ears)
    spans.log_steps("info")
    logger.setLevel(level)


@on_each_rank(1, build)
def test_the_debug_log_tells_the_order_of_a_step(rank, model, lines):
    engine = trained(model)
    spans.log_steps("steps")
    run_steps(engine, 0, [1])
    assert not spans._open
    spans.log_steps("info")
    said = [line.split(" ms ", 1)[1] for line in lines]
    block = [each.rpartition(",")[0] for each in said if each.split(",")[0].endswith("blocks.1")]
    size = sum(p.numel() * 4 for p in Stack(1).blocks[0].parameters())
    assert block == [
        f"all_gather blocks.1, {size:,} bytes",
        "wait_all_gather blocks.1",
        "forward blocks.1",
        f"release blocks.1, {size:,} bytes",
        f"all_gather blocks.1, {size:,} bytes",
        "wait_all_gather blocks.1",
        "backward blocks.1",
        f"release blocks.1, {size:,} bytes",
    ]
    at = {each.split(",")[0]: place for place, each in enumerate(said)}
    order = ["backward blocks.1", "backward blocks.0", "update parameters on the device"]
    assert [at[each] for each in order] == sorted(at[each] for each in order)
    assert at["backward blocks.1"] < next(
        place for place, each in enumerate(said) if each.startswith("wait_reduction blocks.1")
    )
    assert all(each.endswith(" ms") for each in said)
    assert any(" ms backward (root)," in line for line in lines)


VARIABLES = [
    ({}, "info", ""),
    ({"HF_ZERO_LOG_LEVEL": ""}, "info", ""),
    ({"HF_ZERO_LOG_LEVEL": "ERROR"}, "error", ""),
    ({"HF_ZERO_LOG_LEVEL": "steps:all"}, "steps:all", ""),
    ({"HF_ZERO_LOG_LEVEL": "1"}, "info", "HF_ZERO_LOG_LEVEL=1 is unknown"),
    ({"HF_ZERO_LOG": "debug:all"}, "steps:all", "is read as HF_ZERO_LOG_LEVEL=steps:all"),
    (
        {"HF_ZERO_LOG": "debug", "HF_ZERO_LOG_LEVEL": "critical"},
        "critical",
        "HF_ZERO_LOG=debug has no effect",
    ),
]


@in_turn("environment, level, warning", VARIABLES)
def test_one_variable_sets_level_and_order_of_steps(environment, level, warning, lines):
    asked, warnings = asked_in(environment)
    assert asked == level and len(warnings) == bool(warning) and warning in "".join(warnings)
    spans.log_steps(level)
    assert not lines and spans.logs == level.startswith("steps")


@pytest.fixture
def waited(monkeypatch):
    """The devices that were waited for; each look at the clock is a second after the last."""
    devices = []
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    seconds = count()
    monkeypatch.setattr(stopwatch, "time", clock)
    monkeypatch.setattr(stopwatch.kinds, "synchronize", devices.append)
    return devices


def run(steps, **more):
    model = stack()
    engine = start(model, adamw(model), config_of(2, Plan(accumulation=2), **more))
    run_steps(engine, 0, range(steps), 2)
    return engine


@in_turn("every", [2, None])
def test_times_of_parts_and_when_they_are_logged(waited, heard_in_full, every):
    heard_in_full.clear()
    engine = run(3, wall_clock_breakdown=True, steps_per_print=every)
    second = dict.fromkeys(("fwd", "bwd", "step"), 1e3)
    assert engine.measures.times.micro_batch == second
    assert engine.measures.times.window == dict.fromkeys(second, 2000.0)
    assert waited == []
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
