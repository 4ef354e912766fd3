"""The lines that a run writes by itself: a summary at the start, one for each save and load, one
every ``steps_per_print`` steps, or by time, once for all ranks.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tqdm import tqdm

import hf_zero
from hf_zero.config.provenance import SourcedDict
from hf_zero.measures import step_line
from hf_zero.zero.step.step_reports import StepMeasures
from tests.helpers.stacks import on_ranks

BYTES = r"[\d.,]+ (?:B|kB|MB|GB|TB)"
TIER = rf"memory: {BYTES} predicted, excluding activations; {BYTES} free"
START = [
    r"Stack: [\d,]+ parameters, all trainable, in fp32; stage 3 on 2 ranks of 1 host",
    r"  \d units \(modules that are gathered and reduced together\)",
    rf"  {TIER}.*",
    r"  kernels: off \(default\); `kernels: auto` runs those that are fast on this device",
    r"  resolved configuration .*",
]


def train(rank, model, folder: str) -> None:
    config = {
        "$schema": "schema.json",
        "stage": 3,
        "optimizer": {"type": "AdamW"},
        "steps_per_print": 2,
        "checkpoint": {"folder": folder},
        "zero_optimization": {"round_robin_gradients": True},
    }
    engine, *_ = hf_zero.initialize(model, config)
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 7)).square().mean())
        engine.step()
    engine.save_checkpoint()
    engine.load_checkpoint()
    engine.destroy()


@pytest.fixture
def told(heard_in_full: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of hf-zero's logger, of all ranks."""
    monkeypatch.setenv("RANK", "0")
    return heard_in_full


def test_a_run_says_what_it_is_about_to_do_and_does(told, tmp_path) -> None:
    on_ranks(2, train, str(tmp_path))
    (start,) = [each for each in told if "resolved configuration" in each]
    lines = start.splitlines()
    for expected, line in zip(START, lines):
        assert re.fullmatch(expected, line), line
    written = lines[len(START) :]
    assert all(line.startswith("    ") for line in written) and "$schema" not in start
    assert sum("config dict: " in line for line in written) == 1
    assert "    without effect in hf-zero:" in written
    assert any("round_robin_gradients: it concerns" in line for line in written)
    (step,) = [each for each in told if each.startswith("step ")]
    assert re.fullmatch(
        rf"step 2: loss \S+, learning_rate 0.001, grad_norm \S+, samples/s \S+, ms/step \S+, "
        rf"model state {BYTES}",
        step,
    )
    (saved,) = [each for each in told if each.startswith("saved ")]
    assert re.fullmatch(rf"saved {tmp_path}/global_step2: ({BYTES}) in \d+\.\d\d s", saved)
    loaded = {each for each in told if each.startswith("loaded ")}
    assert all(
        re.fullmatch(
            rf"loaded {tmp_path}/global_step2, of 2 ranks at stage 3: {BYTES} on this rank in "
            r"\d+\.\d\d s",
            each,
        )
        for each in loaded
    )
    assert loaded


def test_one_rank_says_that_nothing_is_sharded(told, monkeypatch) -> None:
    started = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    for launched in (True, False):
        if not launched:
            monkeypatch.delenv("RANK")
        for stage in (0, 1, 3):
            engine, *_ = hf_zero.initialize(torch.nn.Linear(2, 2), {"stage": stage})
            engine.destroy()
            started.append(next(each for each in reversed(told) if "stage" in each).splitlines())
    for stage, launched, lines in zip((0, 1, 3) * 2, (True,) * 3 + (False,) * 3, started):
        said = [line for line in lines if "nothing is sharded on one rank" in line]
        assert len(said) == (stage > 0) and not any("unit" in line for line in lines)
        assert all(("hf-zero launch --ranks N" in line) is not launched for line in said)
        # an engine for evaluation is one by intent or by oversight: its first line tells
        assert lines[0].startswith(
            "Linear: 6 parameters, for evaluation, as no optimizer was given, in fp32; stage"
        )


@pytest.mark.parametrize("offload", [False, True])
def test_parameters_that_all_stay_whole_are_not_gathered(offload: bool, told) -> None:
    """An offload of them has a warning of its own."""

    def start(rank: int, model: Any) -> None:
        section = {"stage3_param_persistence_threshold": 100_000}
        section |= {"offload_param": {"device": "cpu"}} if offload else {}
        made = torch.optim.AdamW(model.parameters())
        config = {"stage": 3, "zero_optimization": section}
        hf_zero.initialize(model, config, optimizer=made)[0].destroy()

    on_ranks(2, start)
    (lines,) = [each.splitlines() for each in told if "resolved configuration" in each]
    assert re.fullmatch(r"  \d units \(modules that are reduced together\)", lines[1])
    said = (
        "  all parameters stay whole on each rank: none has more than 100,000 elements "
        "(zero_optimization.stage3_param_persistence_threshold); set it to 0 to shard them"
    )
    assert (lines[2] == said) is not offload
    assert sum("offload_param moves nothing" in each for each in told) == offload
    assert sum("stay" in line and "whole" in line for line in lines) == (not offload)


def test_the_bytes_of_a_save_are_those_of_its_files(told, tmp_path) -> None:
    on_ranks(2, train, str(tmp_path))
    (saved,) = [each for each in told if each.startswith("saved ")]
    size = sum(path.stat().st_size for path in (tmp_path / "global_step2").iterdir())
    value, unit = re.findall(r": ([\d.]+) (\w+) in", saved)[0]
    shown = float(value) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]
    assert shown == pytest.approx(size, rel=0.05), "the manifest itself is left out"


def written_by_accelerate() -> SourcedDict:
    config = SourcedDict({"stage": 2, "steps_per_print": math.inf})
    return config.remember({"stage": (2, "config file zero2.json")}, "Accelerate")


@pytest.mark.parametrize(
    "config, seconds, bar, elsewhere, steps",
    [
        ({"stage": 3}, 30, False, False, [1]),
        ({"stage": 1}, 0, False, False, [1, 2, 3]),
        (written_by_accelerate(), 30, False, False, [1]),
        ({"stage": 2, "steps_per_print": math.inf}, 0, False, False, []),
        ({"stage": 2, "log_level": "warning"}, 0, False, False, []),
        ({"stage": 2}, 0, True, False, []),
        ({"stage": 2}, 0, False, True, []),
        ({"stage": 2, "steps_per_print": 2}, 0, True, True, [2]),
        ({"stage": 2, "metrics": {"enabled": True}}, 0, False, False, [1, 2, 3]),
    ],
)
def test_lines_by_time(
    config: Any,
    seconds: float,
    bar: bool,
    elsewhere: bool,
    steps: list[int],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 logs its first step and then a line each ``SECONDS``, unless a bar, a trainer or the
    script shows them; no other rank does anything for it.
    """
    monkeypatch.setattr(step_line, "SECONDS", seconds)
    measured = {"metrics", "steps_per_print"} & {*config} and config.get("steps_per_print") != (
        math.inf
    )

    def run(rank: int, model: Any) -> list[float]:
        given = config if isinstance(config, SourcedDict) else dict(config)
        engine, *_ = hf_zero.initialize(
            model, given, optimizer=torch.optim.AdamW(model.parameters())
        )
        if elsewhere:
            engine.measures.shown_elsewhere()
        losses = []
        with tqdm(total=3) if bar and rank == 0 else nullcontext():
            for step in range(3):
                loss = engine(torch.full((2, 7), 1.0 + rank + step)).square().mean()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        assert rank == 0 or measured or type(engine.measures) is StepMeasures
        engine.destroy()
        return losses

    losses, others = on_ranks(2, run)
    lines = [each for each in told if re.match(r"step \d+: ", each)]
    assert [int(each.split()[1].strip(":")) for each in lines] == steps
    for step, line in zip(steps, lines):
        own = re.search(r"loss (\S+?)( \(rank 0's batches only\))?, ", line)
        assert own is not None and bool(own[2]) == (not measured)
        whole = (losses[step - 1] + others[step - 1]) / 2
        assert float(own[1]) == pytest.approx(whole if measured else losses[step - 1], rel=1e-4)
        for figure in ("learning_rate", "grad_norm", "samples/s", "ms/step", "model state"):
            assert figure in line


def test_a_resumed_run_logs_its_first_step(told, tmp_path) -> None:
    def run(rank: int, model: Any) -> None:
        engine, *_ = hf_zero.initialize(
            model, {"stage": 3}, optimizer=torch.optim.AdamW(model.parameters())
        )
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 7)).square().mean())
            engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine, *_ = hf_zero.initialize(
            model,
            {"stage": 3},
            optimizer=torch.optim.AdamW(model.parameters()),
            resume=str(tmp_path),
        )
        engine.backward(engine(torch.ones(3, 7)).square().mean())
        engine.step()
        engine.destroy()

    on_ranks(2, run)
    lines = [each.split(":")[0] for each in told if re.match(r"step \d+: ", each)]
    assert lines == ["step 1", "step 3"]
