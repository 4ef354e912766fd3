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
from tests.checkpoint.memory.jobs import Meshed, attempt, heard, hosts, same
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights, start
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed, run_ranks
from tests.parallel.pipelines import batches, config, pipeline, sgd

__all__ = ["heard", "hosts"]


def tensor(**more: Any) -> Meshed:
    return Meshed(together=2, keys={"tensor_parallel": {"autotp_size": 2}}, **more)


def experts(**more: Any) -> Meshed:
    keys = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    return Meshed(model="mixtral", keys=keys, **more)


HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
ROWS = {
    "tensor 2, stage 3": tensor(),
    "tensor 2 x 2, stage 1": tensor(stage=1, ranks=4, hosts="aabb"),
    "tensor 2 over hosts, stage 3": tensor(ranks=4, hosts="abab"),
    "experts 2, stage 3": experts(),
    "experts 2 x 2, stage 2": experts(stage=2, ranks=4, hosts="aabb"),
    "sequences 2 x 2, stage 2": Meshed(
        stage=2, ranks=4, hosts="aabb", together=2, keys={"sequence_parallel_size": 2}
    ),
    "secondary shards in the node": Meshed(ranks=4, hosts="aabb", keys=HPZ),
    "replicas, stage 3": Meshed(ranks=4, hosts="aabb", keys={"replicate_size": 2}),
    "replicas, stage 1": Meshed(stage=1, ranks=4, hosts="abab", keys={"replicate_size": 2}),
}
OFTEN = ("tensor 2 x 2, stage 1", "experts 2, stage 3", "secondary shards in the node")


def placed(setup: Meshed, tmp_path: Path) -> Meshed:
    (tmp_path / "disk").mkdir(parents=True)
    return dataclasses.replace(setup, folder=tmp_path / "disk", base=tmp_path / "memory")


@pytest.mark.parametrize("row", fast(ROWS, lambda row: row in OFTEN))
def test_a_restart_without_a_host_is_exact(row: str, tmp_path: Path) -> None:
    setup = placed(ROWS[row], tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(5))
    attempt(setup, range(3))
    shutil.rmtree(setup.folder_of("b"))
    resumed = attempt(setup, range(5), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {3}
    same(resumed, whole)


@pytest.mark.parametrize(
    ("before", "after"),
    fast(
        [
            (tensor(), Meshed()),
            (Meshed(ranks=4, hosts="aabb"), tensor()),
            (experts(stage=2), Meshed(model="mixtral")),
        ],
        lambda before, after: before.together == 2,
    ),
    ids=["from tensor 2", "to tensor 2", "from experts 2"],
)
def test_other_parallel_sizes_load_as_from_disk(
    before: Meshed, after: Meshed, tmp_path: Path
) -> None:
    before = placed(before, tmp_path)
    after = dataclasses.replace(after, folder=before.folder, base=before.base)

    def to_disk(engine: Any, rank: int) -> None:
        before.train(engine, rank, range(3))
        engine.save_checkpoint(str(tmp_path / "saved"))

    attempt(before, range(3), before=to_disk)
    resumed = attempt(after, range(5), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {3}
    elsewhere = dataclasses.replace(after, base=tmp_path / "other")
    same(resumed, attempt(elsewhere, range(5), tmp_path / "saved"))


def test_a_resume_keeps_parallel_sizes(tmp_path: Path) -> None:
    before = placed(tensor(stage=1), tmp_path)
    attempt(before, range(2))
    after = dataclasses.replace(before, keys={}, together=1)
    models = after.models()
    saving._claimed.clear()

    def resumes(rank: int) -> None:
        threading.current_thread().host = after.hosts[rank]  # type: ignore[attr-defined]
        start(models[rank], after.optimizer(models[rank]), after.config, resume="latest")

    said = r"global_step2 was saved with other parallel sizes \(tensor 2, now 1\); configure those"
    with pytest.raises(RankFailed, match=said):
        run_ranks(2, resumes)


def in_stages(rank: int, tmp_path: Path) -> Any:
    """Three attempts of one job in two stages: uninterrupted, ended after three steps, and resumed
    from memory without the second host's files.
    """
    os.environ["HF_ZERO_HOST"] = "ab"[rank]
    made = []
    for base, steps, resumes in (("other", 5, False), ("memory", 3, False), ("memory", 5, True)):
        saving._claimed.clear()  # the engines of the attempt before are gone with its processes
        memory = {"every": 1, "folder": str(tmp_path / base), "job": "job"}
        more = {"checkpoint": {"memory": memory}}
        engine = initialize(model=pipeline(2, 2), config=config(4, 1, **more), optimizer=sgd)[0]
        if resumes:
            if rank == 1:
                shutil.rmtree(engine.memory.folder(engine.memory.base))
            engine.load_checkpoint(str(tmp_path / "disk"))
        first = engine.global_steps
        data = batches(4 * 5)[4 * first : 4 * steps]
        losses = [
            float(engine.train_batch(iter(data[4 * n : 4 * n + 4]))) for n in range(steps - first)
        ]
        weights = {name: p.detach().clone() for name, p in full_weights(engine).items()}
        engine.memory.wait()
        made.append((first, losses, weights, None))
    return made


def test_stages_of_a_pipeline_resume(tmp_path: Path) -> None:
    made = run_processes(2, in_stages, tmp_path)
    whole, _, resumed = zip(*made)
    assert [first for first, *_ in resumed] == [3, 3]
    same(resumed, whole)
