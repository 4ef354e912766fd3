"""Trainers on two CPU ranks: by each route to ZeRO, beside DDP and beside one process."""

from pathlib import Path

import pytest

from tests.helpers.launched import torchrun
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
        for key in ("loss", "grad_norm", "learning_rate"):
            assert routes[0][name][key] == pytest.approx(oracle[key], rel=1e-5) != [], name
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
