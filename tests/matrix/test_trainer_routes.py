"""The Trainer on two CPU ranks by every route to ZeRO, beside DDP in the same processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launched import accelerate_launch, torchrun
from tests.helpers.trainers import STEPS

SCRIPT = Path(__file__).parent / "scripts" / "trainer_routes.py"

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    return torchrun(SCRIPT, tmp_path_factory.mktemp("routes"), "--what", "routes")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """With an evaluation before, in a Trainer of its own."""
    out, keys = tmp_path_factory.mktemp("launched"), {"gradient_accumulation_steps": 2}
    return accelerate_launch(SCRIPT, out, "--what", "launched", stage=3, **keys)


ZERO = ("ours0", "ours1", "ours2", "ours3", "callback3", "stock3")


def test_two_ranks_know_that_they_are_two(routes):
    for rank, seen in enumerate(routes):
        for name, entry in seen.items():
            assert entry["world"] == [2, 2], name
            assert entry["main"] is (rank == 0), name
            assert entry["batches"] == STEPS, name  # half of the rows


def test_stages_and_routes_train_as_ddp(routes):
    oracle = routes[0]["ddp"]
    assert oracle["kind"] == "DistributedDataParallel" and len(oracle["loss"]) == STEPS
    for name in ZERO:
        for key in ("loss", "grad_norm"):
            assert routes[0][name][key] == pytest.approx(oracle[key], rel=1e-5), name
    assert (
        routes[0]["ours3"]["loss"] == routes[0]["callback3"]["loss"] == routes[0]["stock3"]["loss"]
    )
    for stage in range(4):
        assert routes[0][f"ours{stage}"]["digest"] == pytest.approx(oracle["digest"], rel=1e-7)


def test_all_of_them_are_sharded(routes):
    whole = routes[0]["ours0"]["bytes"]
    for rank, seen in enumerate(routes):
        for name in ZERO:
            entry, stage = seen[name], int(name[-1])
            assert (entry["kind"], entry["distributed"], entry["stage"], entry["rank"]) == (
                "DeepSpeedEngine",
                "DEEPSPEED",
                stage,
                rank,
            )
            shares = {
                "optimizer": 2 if stage >= 1 else 1,
                "gradients": 2 if stage >= 2 else 1,
                "parameters": 2 if stage == 3 else 1,
            }
            for kind, share in shares.items():
                assert entry["bytes"][kind] == pytest.approx(whole[kind] / share, rel=0.02), (
                    name,
                    kind,
                )


def test_a_plain_trainer_afterwards_is_plain(routes):
    again, oracle = routes[0]["plain again"], routes[0]["ddp"]
    assert (again["kind"], again["distributed"]) == ("DistributedDataParallel", "MULTI_CPU")
    assert again["loss"] == oracle["loss"]


def test_the_callback_reports_on_every_rank(routes):
    for seen in routes:
        entry = seen["callback3"]
        assert len(entry["tokens_per_second"]) == len(entry["memory_mib"]) == STEPS
        assert all(value > 0 for value in [*entry["tokens_per_second"], *entry["memory_mib"]])


def test_evaluation_before_training(routes):
    for seen in routes:
        entry = seen["whole"]
        assert entry["before"] == pytest.approx(entry["expected before"], rel=1e-6)
        assert entry["predicted"] == 5


def test_resuming_is_exact_and_finds_the_best_model(routes):
    whole, resumed = routes[0]["whole"], routes[0]["resumed"]
    for key in ("loss", "grad_norm", "eval_loss"):
        assert resumed[key] == whole[key]
    assert resumed["best"] == resumed["found again"] == min(whole["eval_loss"])


def test_saved_weights_are_the_models(routes):
    assert all(seen["whole"]["saved"] for seen in routes)


@pytest.mark.long  # TRL's trainers are started so in tests/matrix
def test_accelerate_launch_gives_a_stock_trainer_the_same_training(launched, routes):
    for rank, seen in enumerate(launched):
        entry = seen["launched"]
        assert (entry["kind"], entry["distributed"], entry["stage"], entry["shards"]) == (
            "DeepSpeedEngine",
            "DEEPSPEED",
            3,
            2,
        )
        assert entry["world"] == [2, 2] and entry["main"] is (rank == 0)
    entry, oracle = launched[0]["launched"], routes[0]["ours3"]
    assert (
        entry["loss"] == oracle["loss"]
        and entry["grad_norm"] == oracle["grad_norm"]
        and entry["digest"] == oracle["digest"]
    )
    assert entry["before"] == pytest.approx(routes[0]["whole"]["expected before"], rel=1e-6)
