"""Trainers on two CPU ranks, beside the same lines plainly in one process: what they log,
generate, measure, save and keep.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers import oracle
from tests.helpers.launched import beside, torchrun
from tests.helpers.offloads import offload

SCRIPT = Path(__file__).parent / "scripts" / "trainer_cases.py"
FAST = ("bart", "stopped")
LONG = ("t5", "marian", "metrics", "model_only")

# started at the first call, read when it is done
Plain = Callable[[tuple[str, ...]], tuple[Path, Callable[[], dict[str, Any]]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with ExitStack() as stack:

        @cache
        def run(cases):
            out = tmp_path_factory.mktemp("alone")
            return out, stack.enter_context(beside(SCRIPT, out, "--cases", *cases))

        yield run


def numbers(entry):
    """``entry`` with its floats apart, so that the rest can be compared exactly."""
    if isinstance(entry, float):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
    return [number for each in inner for number in numbers(each)]


def shape(entry):
    if isinstance(entry, dict):
        return {key: shape(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return [shape(each) for each in entry]
    return None if isinstance(entry, float) else entry


def compare(cases, stages, plain, out, offloaded=""):
    section = offload(offloaded, max(stages), out) if offloaded else {}
    section.pop("stage", None)
    place, report = plain(cases)
    reports = torchrun(
        SCRIPT,
        out,
        "--cases",
        *cases,
        "--stages",
        *map(str, stages),
        "--offload",
        json.dumps(section),
    )
    want = report()
    for stage in stages:
        for case in cases:
            expected = {
                key: value
                for key, value in want[f"{case} None"].items()
                if key not in ("type", "stage")
            }
            for report in reports:
                found = report[f"{case} {stage}"]
                assert found.pop("type").endswith("DEEPSPEED") and found.pop("stage") == stage
                assert shape(found) == shape(expected), f"{case} at stage {stage}"
                assert numbers(found) == pytest.approx(numbers(expected), rel=1e-5), (
                    f"{case} at stage {stage}"
                )
            weights = [
                torch.load(folder / f"{case}-{at}.pt")
                for folder, at in ((out, stage), (place, None))
            ]
            oracle.compare_tensors(
                f"{case} at stage {stage}: weights", *weights, floor=oracle.ADAM_ROUNDING
            )


def test_generation_metrics_and_early_stopping(plain, tmp_path):
    """Rows that do not fill the last batch, answers of other lengths on other ranks, batches of
    like lengths, smoothed labels.
    """
    compare(FAST, (3,), plain, tmp_path)
    lengths = [len(row) for row in plain(FAST)[1]()["bart None"]["before"]]
    assert max(lengths[:4]) != max(lengths[4:8]), "rank 1 should have had to wait for rank 0"


@pytest.mark.long
def test_the_same_at_stage_2(plain, tmp_path):
    compare(FAST, (2,), plain, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "stage, offloaded", [(2, "optimizer on cpu"), (3, "all on cpu"), (3, "all in files")]
)
def test_the_same_offloaded(stage, offloaded, plain, tmp_path):
    compare(FAST, (stage,), plain, tmp_path, offloaded)


@pytest.mark.long
def test_other_models_and_checkpoints_of_the_model_alone(plain, tmp_path):
    compare(LONG, (2, 3), plain, tmp_path)
    for step in (2, 4):
        want = transformers.AutoModelForCausalLM.from_pretrained(
            plain(LONG)[0] / "model_only-None" / f"checkpoint-{step}"
        ).state_dict()
        for stage in (2, 3):
            folder = tmp_path / f"model_only-{stage}" / f"checkpoint-{step}"
            assert not [
                path.name
                for path in folder.iterdir()
                if path.name.startswith(("global_step", "optimizer", "scheduler"))
            ]
            oracle.compare_tensors(
                "checkpoint",
                transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict(),
                want,
                floor=oracle.ADAM_ROUNDING,
            )
