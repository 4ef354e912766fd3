"""Trainers on two CPU ranks: by each route to ZeRO, beside DDP and beside one process."""

from pathlib import Path

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.launched import accelerate_launch, beside, torchrun
from tests.helpers.trainers import STEPS

SCRIPT = Path(__file__).parent / "scripts" / "trainer_cases.py"
ZERO = ("ours0", "ours2", "ours3", "callback3", "stock3")


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    cases = ("ddp0", *ZERO, "again0")
    return torchrun(SCRIPT, tmp_path_factory.mktemp("routes"), "--cases", *cases)


def test_stages_and_routes_train_as_ddp_in_shards(routes):
    oracle = routes[0]["ddp0"]
    assert oracle["kind"] == "DistributedDataParallel" and len(oracle["loss"]) == STEPS
    for name in ZERO:
        for key in ("loss", "grad_norm"):
            assert routes[0][name][key] == pytest.approx(oracle[key], rel=1e-5), name
        if name.startswith("ours"):
            assert routes[0][name]["digest"] == pytest.approx(oracle["digest"], rel=1e-7)
        else:
            assert routes[0][name]["loss"] == routes[0]["ours3"]["loss"]
    again = routes[0]["again0"]  # a plain Trainer afterwards is plain
    assert (again["kind"], again["distributed"]) == ("DistributedDataParallel", "MULTI_CPU")
    assert again["loss"] == oracle["loss"]

    whole = routes[0]["ours0"]["bytes"]
    for rank, seen in enumerate(routes):
        for name, entry in seen.items():
            assert (entry["world"], entry["main"]) == ([2, 2], rank == 0), name
            assert entry["batches"] == STEPS, name  # half of the rows
        for name in ZERO:
            entry, stage = seen[name], int(name[-1])
            place = (entry["kind"], entry["distributed"], entry["stage"], entry["rank"])
            assert place == ("DeepSpeedEngine", "DEEPSPEED", stage, rank)
            for kind, since in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
                share = whole[kind] / (2 if stage >= since else 1)
                assert entry["bytes"][kind] == pytest.approx(share, rel=0.02), (name, kind)
        for key in ("tokens_per_second", "memory_mib"):
            told = seen["callback3"][key]
            assert len(told) == STEPS and min(told) > 0


@pytest.mark.long
def test_accelerate_launch_gives_a_stock_trainer_the_same_training(routes, tmp_path):
    more = {"stage": 3, "gradient_accumulation_steps": 2}
    reports = accelerate_launch(SCRIPT, tmp_path, "--cases", "plain3", **more)
    for rank, seen in enumerate(reports):
        entry, want = seen["plain3"], routes[rank]["ours3"]
        for key in ("kind", "distributed", "stage", "world", "main", "loss", "grad_norm", "digest"):
            assert entry[key] == want[key], key


# ---- generation, metrics, early stopping ----


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


@pytest.mark.long
def test_generation_metrics_and_early_stopping(tmp_path):
    cases, stage = ("bart", "stopped"), 3
    with beside(SCRIPT, tmp_path / "alone", "--cases", *cases) as plain:
        reports = torchrun(SCRIPT, tmp_path, "--cases", *cases, "--stages", str(stage))
        want = plain()
    for case in cases:
        expected = dict(want[f"{case} None"])
        assert expected.pop("type").endswith("NO") and expected.pop("stage") is None
        for report in reports:
            found = report[f"{case} {stage}"]
            assert found.pop("type").endswith("DEEPSPEED") and found.pop("stage") == stage
            assert shape(found) == shape(expected), case
            assert numbers(found) == pytest.approx(numbers(expected), rel=1e-5), case
        files = (tmp_path / f"{case}-{stage}.pt", tmp_path / "alone" / f"{case}-None.pt")
        weights = [torch.load(file) for file in files]
        oracle.compare_tensors(case, *weights, floor=oracle.ADAM_ROUNDING)
    lengths = [len(row) for row in want["bart None"]["before"]]
    assert max(lengths[:4]) != max(lengths[4:8]), "rank 1 should have had to wait for rank 0"
