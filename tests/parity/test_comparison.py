"""The comparison of records that no training has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.parity.comparison import Comparison, Difference, RunRecord
from hf_zero.parity.runs import DEEPSPEED, ENGINE, PLAIN, TORCH
from hf_zero.parity.session import compare
from hf_zero.parity.sketch import sketch
from hf_zero.parity.start import FULL_PRECISION

NAMES = ("a", "b", "c")
ABOUT = {
    "engine": 0, "step": 0, "world": 1, "precision": "bf16", "autocast": False, "observed": False,
    "sizes": dict.fromkeys(NAMES, 1000), "units": {}, "resumed_at": 0, "blocks": 0, "whole": {},
    "left_out": [], "own_update": None,
}  # fmt: skip
STEP = {
    "engine": 0, "step": 1, "losses": [1.0], "inputs": [], "evaluations": [], "norm": 1.0,
    "rates": [0.1], "applied": True, "scale": 1.0, "whole": {}, "log": [],
}  # fmt: skip


def record(folder: Path, off: dict[str, float], **numbers: Any) -> RunRecord:
    """The record of one step that moves each parameter by a vector of norm 1, and ``off`` it by
    another direction; ``numbers``: of the step.
    """
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    for step, about in ((0, ABOUT), (1, {**STEP, **numbers})):
        masters = {}
        for name in NAMES:
            draws = torch.randn(3, 1000, generator=torch.Generator().manual_seed(ord(name)))
            start, way, aside = torch.nn.functional.normalize(draws)
            values = start + step * (way + off.get(name, 0.0) * aside)
            masters[name] = [0, 1000, *sketch(values, name)]
        lines.append({**about, "masters": masters})
    lines.append({"end": "all steps are recorded", "evaluations": []})
    (folder / "rank0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return RunRecord(folder)


def first_difference(folder: Path, off: float) -> Difference | None:
    reference, run = record(folder / "reference", {}), record(folder / "run", {"a": off})
    measured = record(folder / "measured", {"a": 0.01, "b": 0.1, "c": 0.1})
    return Comparison(reference, run, measured).outcome().first


@pytest.mark.parametrize("off", [0.05, 0.8])
def test_what_rounding_does_to_most_weights_is_allowed_of_each(off: float, tmp_path: Path) -> None:
    first = first_difference(tmp_path, off)
    if off == 0.05:
        assert first is None
    else:
        assert first is not None and (first.what, first.parameter) == ("weights", "a")


@pytest.mark.parametrize(("off", "found"), [(0.03, False), (0.05, True)])
def test_a_loss_is_judged_by_the_largest_error_of_rounding(
    off: float, found: bool, tmp_path: Path
) -> None:
    """Not by their mean: two runs in 16 bits round independently."""
    reference = record(tmp_path / "reference", {}, losses=[1.0] * 4)
    run = record(tmp_path / "run", {}, losses=[1.0, 1.0, 1.0, 1.0 + off])
    measured = record(tmp_path / "measured", {}, losses=[1.01, 1.0, 1.0, 1.0])
    first = Comparison(reference, run, measured).outcome().first
    assert (first is not None and first.what == "loss") == found


@pytest.mark.parametrize(
    ("kind", "third"), [(PLAIN, (TORCH, "")), (DEEPSPEED, (DEEPSPEED, FULL_PRECISION))]
)
def test_what_measures_rounding_in_16_bits(
    kind: str, third: tuple[str, str], tmp_path: Path
) -> None:
    """Beside autocast of DDP a model that is cast, whose error is another one."""
    made: list[tuple[str, str]] = []

    def run(name: str, engine: str, variant: str = "", **fields: Any) -> RunRecord:
        made.append((engine, variant))
        return record(
            tmp_path / name, {"hf-zero": {"a": 0.05}, "rounding": {"a": 0.06}}.get(name, {})
        )

    assert compare(run, None, kind=kind).equal
    assert made == [(kind, ""), (ENGINE, ""), (kind, ""), third]


@pytest.mark.parametrize(
    ("numbers", "repeats"),
    [
        ({}, True),
        ({"losses": [1.0001], "norm": 1.003}, True),  # half of the last place of 16 bits
        ({"losses": [1.01]}, False),
        ({"norm": 1.02}, False),
        ({"inputs": [[2.0, 1.0, 1.0]]}, False),
    ],
)
def test_a_run_that_is_no_repetition(
    numbers: dict[str, Any], repeats: bool, tmp_path: Path
) -> None:
    """Its difference is no rounding, so that nothing is measured and nothing allowed by it."""
    made: list[str] = []

    def run(name: str, engine: str, variant: str = "", **fields: Any) -> RunRecord:
        made.append(name)
        of_step = {"inputs": [[1.0, 1.0, 1.0]], **(numbers if name == "repeat" else {})}
        off = {"hf-zero": {"a": 0.05}, "rounding": {"a": 0.06}}.get(name, {})
        return record(tmp_path / name, off, **of_step)

    answer = compare(run, None)
    assert answer.equal == answer.measured == ("rounding" in made) == repeats
    assert repeats or "two runs of torch alone differ as well" in repr(answer)
