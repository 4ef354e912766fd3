"""The lines that a run writes by itself: a summary at the start, one for each save and load, one
every ``steps_per_print`` steps, or by time, once for all ranks.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext

import pytest
import torch
from tqdm import tqdm

import hf_zero
from hf_zero.config.provenance import SourcedDict
from hf_zero.measures import step_line
from hf_zero.zero.step.step_reports import StepMeasures
from tests.helpers.cells import in_turn
from tests.helpers.stacks import on_ranks

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


def test_one_rank_says_that_nothing_is_sharded(told, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    for launched in (True, False):
        if not launched:
            monkeypatch.delenv("RANK")
        for stage in (0, 1, 3):
            engine, *_ = hf_zero.initialize(torch.nn.Linear(2, 2), {"stage": stage})
            engine.destroy()
            lines = next(each for each in reversed(told) if "stage" in each).splitlines()
            said = [line for line in lines if "nothing is sharded on one rank" in line]
            assert len(said) == (stage > 0) and not any("unit" in line for line in lines)
            assert all(("hf-zero launch --ranks N" in line) is not launched for line in said)
            # an engine for evaluation is one by intent or by oversight: its first line tells
            assert lines[0].startswith("Linear: 6 parameters, for evaluation, as no optimizer was")


@in_turn("offload", [False, True])
def test_parameters_that_all_stay_whole_are_not_gathered(offload, told):
    """An offload of them has a warning of its own."""
    told.clear()

    def start(rank, model):
        section = {"stage3_param_persistence_threshold": 100_000}
        section |= {"offload_param": {"device": "cpu"}} if offload else {}
        begun(model, {"stage": 3, "zero_optimization": section}).destroy()

    on_ranks(2, start)
    (lines,) = [each.splitlines() for each in told if "resolved configuration" in each]
    assert re.fullmatch(r"  \d units \(modules that are reduced together\)", lines[1])
    said = "  all parameters stay whole on each rank: none has more than 100,000 elements"
    assert lines[2].startswith(said) is not offload
    assert sum("offload_param moves nothing" in each for each in told) == offload
    assert sum("stay" in line and "whole" in line for line in lines) == (not offload)


def written_by_accelerate():
    config = SourcedDict({"stage": 2, "steps_per_print": math.inf})
    return config.remember({"stage": (2, "config file zero2.json")}, "Accelerate")


# (configuration, seconds between lines, a bar is shown, a trainer shows them, steps with a line)
CASES = [
    (lambda: {"stage": 3}, 30, False, False, [1]),
    (lambda: {"stage": 1}, 0, False, False, [1, 2, 3]),
    (written_by_accelerate, 30, False, False, [1]),
    (lambda: {"stage": 2, "steps_per_print": math.inf}, 0, False, False, []),
    (lambda: {"stage": 2, "log_level": "warning"}, 0, False, False, []),
    (lambda: {"stage": 2}, 0, True, False, []),
    (lambda: {"stage": 2}, 0, False, True, []),
    (lambda: {"stage": 2, "steps_per_print": 2}, 0, True, True, [2]),
    (lambda: {"stage": 2, "metrics": {"enabled": True}}, 0, False, False, [1, 2, 3]),
]


@pytest.mark.parametrize("make, seconds, bar, elsewhere, steps", CASES)
def test_lines_by_time(make, seconds, bar, elsewhere, steps, told, monkeypatch):
    """Of rank 0, unless a bar, a trainer or the script shows figures."""
    monkeypatch.setattr(step_line, "SECONDS", seconds)
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
        assert rank == 0 or measured or type(engine.measures) is StepMeasures
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


def test_a_resumed_run_logs_its_first_step(told, tmp_path):
    def run(rank, model):
        engine = begun(model, {"stage": 3})
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine = begun(model, {"stage": 3}, resume=str(tmp_path))
        step(engine)
        engine.destroy()

    on_ranks(2, run)
    lines = [each.split(":")[0] for each in told if re.match(r"step \d+: ", each)]
    assert lines == ["step 1", "step 3"]
