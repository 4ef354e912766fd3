"""Generations in memory of ranks that share layers, experts or shards: resumed bit for bit on the
same ranks, and on other ones as from disk.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hf_zero import initialize
from hf_zero.checkpoint.memory import saving
from tests.checkpoint.memory.jobs import Kept, attempt, firsts, hosts, same, whole
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights, start
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed, run_ranks
from tests.parallel.pipelines import batches, config, pipeline, sgd

__all__ = ["hosts"]

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
WHOLE = {"replicate_size": 1}  # no parallel axis, with the models of the others


def meshed(keys: dict[str, Any], ranks: int = 2, stage: int = 3, hosts: str = "aabb") -> Kept:
    together = 2 if keys.keys() & {"tensor_parallel", "sequence_parallel_size"} else 1
    model = "mixtral" if "expert_parallel" in keys else "llama"
    named = "ab" if ranks == 2 else hosts
    return Kept(ranks, stage, model=model, hosts=named, keys=keys, together=together)


ROWS = {
    "tensor 2, stage 3": meshed(TENSOR),
    "tensor 2 x 2, stage 1": meshed(TENSOR, 4, 1),
    "tensor 2 over hosts, stage 3": meshed(TENSOR, 4, 3, "abab"),
    "experts 2, stage 3": meshed(EXPERTS),
    "experts 2 x 2, stage 2": meshed(EXPERTS, 4, 2),
    "sequences 2 x 2, stage 2": meshed({"sequence_parallel_size": 2}, 4, 2),
    "secondary shards": meshed({"zero_optimization": {"zero_hpz_partition_size": 2}}, 4),
    "replicas, stage 3": meshed({"replicate_size": 2}, 4),
    "replicas, stage 1": meshed({"replicate_size": 2}, 4, 1, "abab"),
}
OFTEN = ("tensor 2 x 2, stage 1", "experts 2, stage 3", "secondary shards")


@pytest.mark.parametrize("row", fast(ROWS, lambda row: row in OFTEN))
def test_a_restart_without_a_host_is_exact(row: str, tmp_path: Path) -> None:
    setup = ROWS[row].at(tmp_path)
    attempt(setup, range(2))
    shutil.rmtree(setup.folder_of("b"))
    resumed = attempt(setup, range(4), tmp_path / "disk")
    assert firsts(resumed) == {2}
    same(resumed, whole(setup, 4))


MOVES = {
    "from tensor 2": (meshed(TENSOR), meshed(WHOLE)),
    "to tensor 2": (meshed(WHOLE, 4), meshed(TENSOR)),
    "from experts 2": (
        meshed(EXPERTS, stage=2),
        dataclasses.replace(meshed(WHOLE), model="mixtral"),
    ),
}


@pytest.mark.parametrize("move", fast(MOVES, lambda move: move == "from tensor 2"))
def test_other_parallel_sizes_load_as_from_disk(move: str, tmp_path: Path) -> None:
    before, after = (setup.at(tmp_path) for setup in MOVES[move])

    def to_disk(engine: Any, rank: int) -> None:
        before.train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))

    attempt(before, range(2), before=to_disk)
    resumed = attempt(after, range(4), tmp_path / "disk")
    assert firsts(resumed) == {2}
    elsewhere = dataclasses.replace(after, base=tmp_path / "other")
    same(resumed, attempt(elsewhere, range(4), tmp_path / "saved"))


def test_a_resume_keeps_parallel_sizes(tmp_path: Path) -> None:
    before = meshed(TENSOR, stage=1).at(tmp_path)
    attempt(before, range(2))
    after = dataclasses.replace(before, keys=WHOLE, together=1)
    models = after.models()
    saving._claimed.clear()

    def resumes(rank: int) -> None:
        threading.current_thread().host = after.hosts[rank]  # type: ignore[attr-defined]
        start(models[rank], after.optimizer(models[rank]), after.config, resume="latest")

    with pytest.raises(RankFailed, match=r"global_step2 .* \(tensor 2, now 1\)"):
        run_ranks(2, resumes)


def in_stages(rank: int, tmp_path: Path) -> Any:
    """Three attempts of one job in two stages: uninterrupted, ended, and resumed without a host."""
    os.environ["HF_ZERO_HOST"] = "ab"[rank]
    made = []
    for base, steps, resumes in (("other", 5, False), ("memory", 3, False), ("memory", 5, True)):
        saving._claimed.clear()  # the engines of the attempt before are gone with its processes
        memory = {"every": 1, "folder": str(tmp_path / base), "job": "job"}
        keys = config(4, 1, checkpoint={"memory": memory})
        engine = initialize(model=pipeline(2, 2), config=keys, optimizer=sgd)[0]
        if resumes:
            if rank == 1:
                shutil.rmtree(engine.memory.folder(engine.memory.base))
            engine.load_checkpoint(str(tmp_path / "disk"))
        first = engine.global_steps
        data = batches(4 * 5)
        windows = [iter(data[4 * step : 4 * step + 4]) for step in range(first, steps)]
        losses = [float(engine.train_batch(window)) for window in windows]
        weights = {name: p.detach().clone() for name, p in full_weights(engine).items()}
        engine.memory.wait()
        made.append((first, losses, weights, None))
    return made


def test_stages_of_a_pipeline_resume(tmp_path: Path) -> None:
    uninterrupted, _, resumed = zip(*run_processes(2, in_stages, tmp_path))
    assert firsts(resumed) == {3}
    same(resumed, uninterrupted)
