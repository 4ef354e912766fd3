"""The profile and the debug log of a step, ``wall_clock_breakdown``, and the cost of each while it
is off.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from itertools import count
from threading import get_ident
from types import SimpleNamespace

import deepspeed
import pytest
from torch.profiler import ProfilerActivity, profile

from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.device import spans
from hf_zero.logging import asked_in, logger
from hf_zero.measures import stopwatch
from hf_zero.measures.collectives import FIGURES
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_ranks, run_steps, stack
from tests.helpers.training import Plan, adamw

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


def test_a_profile_names_what_a_step_does(tmp_path):
    def run(rank, model):
        engine = trained(model)
        if rank:
            run_steps(engine, rank, [1])
            engine.save_checkpoint(str(tmp_path), tag="kept")
            return []
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            run_steps(engine, rank, [1])
            engine.save_checkpoint(str(tmp_path), tag="kept")
        return [event.name for event in recorded.events()]

    names = {name for name in on_ranks(2, run, build=build)[0] if name.startswith("hf_zero::")}
    blocks = [f"blocks.{index}" for index in range(BLOCKS)]
    wanted = [
        *(f"{what} {block}" for what in ("all_gather", "wait_all_gather") for block in blocks),
        *(f"release {block}" for block in blocks),
        "update parameters on the device",
        "save kept",
    ]
    assert {f"hf_zero::{each}" for each in wanted} <= names
    for what in ("reduce_scatter", "wait_reduction"):
        shown = {name.split()[1] for name in names if name.startswith(f"hf_zero::{what} ")}
        assert all(any(key.startswith(block) for key in shown) for block in blocks), what
    assert any(name.startswith("hf_zero::write_file ") for name in names)


@pytest.fixture
def step_lines(lines):
    """Those of one step; no span is open after it."""

    def run(rank, model):
        engine = trained(model)
        spans.log_steps("steps")
        run_steps(engine, 0, [1])
        assert not spans._open
        spans.log_steps("info")

    on_ranks(1, run, build=build)
    return lines


def test_the_debug_log_tells_the_order_of_a_step(step_lines):
    lines = step_lines
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


def test_counting_collectives_leaves_them_where_they_are(monkeypatch):
    """``comms_logger`` serialises none: launches and waits keep their order among blocks."""
    done: list[tuple[int, str]] = []  # by the thread of a rank
    enter = spans.span

    def noted(what, unit="", nbytes=0):
        done.append((get_ident(), f"{what} {unit}"))
        return enter(what, unit, nbytes)

    for module in [each for each in sys.modules.values() if getattr(each, "span", None) is enter]:
        monkeypatch.setattr(module, "span", noted)
    monkeypatch.setattr(spans, "logs", True)  # launches have spans only where they are recorded

    def run(rank, model, more):
        engine = start(model, adamw(model), config_of(3, **more))
        run_steps(engine, rank, [0])
        done[:] = [each for each in done if each[0] != get_ident()]
        run_steps(engine, rank, [1])
        own = [each for thread, each in done if thread == get_ident() and FIGURES not in each]
        engine.destroy()
        return own

    keys = ({}, {"comms_logger": {"enabled": True}})
    try:
        plain, counted = (on_ranks(2, run, more, build=build) for more in keys)
    finally:
        deepspeed.comm.configure(enabled=False)
    assert plain == counted
    for what in ("all_gather", "wait_all_gather", "reduce_scatter", "wait_reduction"):
        assert any(each.startswith(f"{what} blocks.1") for each in plain[0]), what


def test_ranks_but_the_first_log_where_all_are_asked_for(lines, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    for how, lines_said in (("steps", 0), ("steps:all", 1)):
        spans.log_steps(how)
        with spans.span("all_gather", "layers.0", 12):
            pass
        assert len(lines) == lines_said
    assert "all_gather layers.0, 12 bytes, " in lines[0]


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


def calls_of_a_step(depth, **more):
    """Return the number of calls of each function of hf_zero.device.spans in a step, by name."""

    def run(rank, model):
        engine, calls = trained(model, steps=2, **more), Counter()

        def count(frame, event, _):
            if event == "call" and frame.f_code.co_filename == spans.__file__:
                calls[frame.f_code.co_qualname] += 1

        sys.setprofile(count)
        try:
            run_steps(engine, 0, [2])
        finally:
            sys.setprofile(None)
        return calls

    return on_ranks(1, run, build=lambda: seeded(lambda: Stack(depth)))[0]


def test_off_nothing_is_recorded():
    calls = calls_of_a_step(BLOCKS)
    assert set(calls) == {"span"}
    # of each unit two waits for gathers, two releases, a wait for its reduction; the update
    assert calls["span"] <= (BLOCKS + 1) * 5 + 6
    assert spans.span("all_gather", "a unit") is spans.span("update", "another")


def test_off_the_cost_is_that_of_units_and_not_of_blocks():
    small = {"stage": 3, "stage3_module_granularity_threshold": 1 << 20}
    few, many = (calls_of_a_step(depth, zero_optimization=small) for depth in (2, 12))
    assert few == many


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


@pytest.mark.parametrize("every", [2, None])
def test_times_of_parts_and_when_they_are_logged(waited, heard_in_full, every):
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


def test_nothing_is_measured_without_the_key(waited, heard_in_full):
    engine = run(1, steps_per_print=1)
    assert waited == [] and DeepSpeedEngine.get_wall_clock_timers(engine) == {}
    assert not any("time (ms)" in line for line in heard_in_full)
    engine.destroy()


def test_rank_0_alone_logs(heard_in_full):
    def on_rank(rank, model):
        engine = trained(model, 1, rank, wall_clock_breakdown=True)
        assert min(engine.measures.times.window.values()) > 0

    on_ranks(2, on_rank)
    assert sum("time (ms)" in line for line in heard_in_full) == 1
