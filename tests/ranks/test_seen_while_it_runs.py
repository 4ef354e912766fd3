"""The lines that a run writes by itself: a summary at the start, one for each save and load, one
every ``steps_per_print`` steps, once for all ranks.
"""

from __future__ import annotations

import re

import pytest
import torch

import hf_zero
from tests.helpers.stacks import on_ranks

BYTES = r"[\d.,]+ (?:B|kB|MB|GB|TB)"
TIER = rf"memory: {BYTES} predicted beside activations, {BYTES} free"
START = [
    r"Stack: [\d,]+ parameters, all of them train, in fp32 and \d units; stage 3 on 2 ranks of 1 "
    "host",
    rf"  {TIER}.*",
    r"  kernels: off \(default\); `kernels: auto` runs those that are fast on this device",
    r"  resolved configuration on 2 ranks .*",
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
    assert any("round_robin_gradients" in line and "no effect: " in line for line in written)
    (step,) = [each for each in told if each.startswith("step ")]
    assert re.fullmatch(
        rf"step 2: loss \S+, learning_rate 0.001, grad_norm \S+, samples/s \S+, ms a step \S+, "
        rf"state {BYTES}",
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


def test_the_bytes_of_a_save_are_those_of_its_files(told, tmp_path) -> None:
    on_ranks(2, train, str(tmp_path))
    (saved,) = [each for each in told if each.startswith("saved ")]
    size = sum(path.stat().st_size for path in (tmp_path / "global_step2").iterdir())
    value, unit = re.findall(r": ([\d.]+) (\w+) in", saved)[0]
    shown = float(value) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]
    assert shown == pytest.approx(size, rel=0.05), "the manifest itself is left out"
