"""``initialize(resume=...)`` and loads of a script whose generations are in memory; ranks that
share layers, experts or shards: resumed bit for bit on the same ranks, and on others as from disk.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint.memory import saving
from hf_zero.checkpoint.memory.resume import newest_in_memory
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError
from hf_zero.measures.metrics_file import read_metrics
from tests.checkpoint.memory.jobs import Kept, attempt, firsts, hosts, same, whole
from tests.checkpoint.memory.test_generations import flip
from tests.checkpoint.test_resume import Rows, config, net, train
from tests.helpers.stacks import on_ranks

__all__ = ["hosts"]


def settings_of(tmp_path: Path, every: int = 1, on_disk: bool = True) -> dict[str, Any]:
    memory = {"every": every, "folder": str(tmp_path / "memory"), "job": "job"}
    folder = {"folder": str(tmp_path / "run")} if on_disk else {}
    return config(tmp_path / "run") | {"checkpoint": {"memory": memory, **folder}}


def on_hosts(world: int, names: str, action: Callable[..., Any], build: Any = net) -> list[Any]:
    saving._claimed.clear()  # the engines of the attempt before are gone with its processes

    def on_rank(rank: int, model: Any) -> Any:
        threading.current_thread().host = names[rank % len(names)]  # type: ignore[attr-defined]
        return action(rank, model)

    return on_ranks(world, on_rank, build=build)


def alone(**how: Any) -> Any:
    """An engine of the next attempt in this process, on host a."""
    saving._claimed.clear()
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    return hf_zero.initialize(model=net(), **how)[0]


def trained(settings: dict[str, Any], **how: Any) -> Any:
    """Steps and engine of an attempt in this process that has saved."""
    saving._claimed.clear()
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    steps, engine = train(0, net(), settings, Rows(), **how)
    engine.memory.wait()
    return steps, engine


class WholeBatches(Rows):
    """As many rows as five steps of eight samples have: no batch of an epoch is filled up."""

    rows = 40


CASES = [(None, 4, "abab"), (1, 2, "ab"), (3, 2, "ab")]


@pytest.mark.parametrize(("on_disk", "after", "names"), CASES)
def test_initialize_resumes_from_the_newer_of_memory_and_disk(tmp_path, on_disk, after, names):
    """Memory has step 2. Steps of 8 samples, in micro-batches of 2, stay on any number of ranks."""
    settings = settings_of(tmp_path, every=2)
    del settings["train_batch_size"]
    settings["gradient_accumulation_steps"] = 2

    def attempt(world: int, **how: Any) -> list[Any]:
        def run(rank: int, model: Any) -> Any:
            steps, engine = train(rank, model, settings, WholeBatches(), **how)
            if engine.memory is not None:
                engine.memory.wait()
            return steps, engine

        return on_hosts(world, names, run)

    def samples(ranks: list[Any]) -> dict[int, list[int]]:
        return {
            step: sorted(chain(*(steps[step][1] for steps, _ in ranks))) for step in ranks[0][0]
        }

    memory = settings["checkpoint"].pop("memory")
    whole = attempt(2)
    settings["checkpoint"]["memory"] = memory
    attempt(2, saves={on_disk}, stop=2 if on_disk != 3 else 3)
    resumed = attempt(after, resume="latest")
    assert {min(steps) for steps, _ in resumed} == {4 if on_disk == 3 else 3}
    for _, engine in resumed:
        assert (str(tmp_path / "memory") in engine.resumed_from) == (on_disk != 3)
        assert engine.train_batch_size() == 8
    wanted = samples(whole)
    assert samples(resumed) == {step: wanted[step] for step in samples(resumed)}
    for (steps, _), (all_steps, _) in zip(resumed, whole) if after == 2 else ():
        assert steps == {step: all_steps[step] for step in steps}


def test_a_checkpoint_that_is_named_is_the_one_that_is_resumed(tmp_path: Path) -> None:
    settings, run = settings_of(tmp_path), tmp_path / "run"
    trained(settings, saves={1}, stop=2)
    for resume, step in ((run / "global_step1", 1), (run, 2), ("latest", 2)):
        engine = alone(config=settings, training_data=Rows(), resume=resume)
        assert engine.global_steps == step
    shutil.rmtree(tmp_path / "memory")
    engine = alone(config=settings_of(tmp_path, on_disk=False), resume="latest")
    assert engine.resumed_from is None and engine.global_steps == 0


def test_the_figures_of_a_run_stay_in_its_folder(tmp_path: Path) -> None:
    """Nothing is saved on disk: the folder is the one that the script resumes."""
    settings = settings_of(tmp_path, every=2, on_disk=False) | {"metrics": {"enabled": True}}
    for stop, first in ((3, 0), (5, 2)):
        steps, engine = trained(settings, stop=stop, resume=str(tmp_path / "run"))
        assert min(steps) == first + 1
        engine.measures.finish(engine)
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == [*range(1, stop + 1)]
        del engine
    assert not list((tmp_path / "memory").rglob("metrics.jsonl"))


def test_a_generation_that_is_lost_between_choice_and_load_is_named(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, on_disk=False)
    trained(settings, stop=1)
    saving._claimed.clear()
    found = newest_in_memory(ZeroConfig.from_dict(settings))
    assert found is not None and found.step == 1
    flip(next((tmp_path / "memory").rglob("slot-*/rank-*.safetensors")))
    engine = alone(config=settings)
    with pytest.raises(CheckpointError, match="cannot be loaded; start the job again"):
        engine.load_checkpoint(found.directory, found.tag)


def test_buffers_that_ranks_change_by_themselves_are_those_of_rank_0(tmp_path):
    settings = settings_of(tmp_path)

    def build() -> Any:
        model = net()
        model.register_buffer("seen", torch.zeros(2))
        return model

    def first(rank: int, model: Any) -> None:
        engine = hf_zero.initialize(model=model, config=settings)[0]
        model.seen.fill_(rank + 1.0)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.memory.wait()

    def second(rank: int, model: Any) -> list[float]:
        engine = hf_zero.initialize(model=model, config=settings, resume="latest")[0]
        assert engine.global_steps == 1
        return model.seen.tolist()

    on_hosts(2, "ab", first, build)
    assert on_hosts(2, "ab", second, build) == [[1.0, 1.0]] * 2


# ---- ranks that share layers, experts or shards ----


TENSOR = {"tensor_parallel": {"autotp_size": 2}}
WHOLE = {"replicate_size": 1}  # no parallel axis, with the models of the others


def meshed(keys: dict[str, Any], ranks: int = 2, stage: int = 3) -> Kept:
    together = 2 if "tensor_parallel" in keys else 1
    hosts = "ab" if ranks == 2 else "aabb"
    return Kept(ranks, stage, model="llama", hosts=hosts, keys=keys, together=together)


ROWS = {
    "tensor 2, stage 3": meshed(TENSOR),
    "secondary shards": meshed({"zero_optimization": {"zero_hpz_partition_size": 2}}, 4),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_restart_without_a_host_is_exact(row: str, tmp_path: Path) -> None:
    setup = ROWS[row].at(tmp_path)
    attempt(setup, range(2))
    shutil.rmtree(setup.folder_of("b"))
    resumed = attempt(setup, range(3), tmp_path / "disk")
    assert firsts(resumed) == {2}
    same(resumed, whole(setup, 3))


def test_other_parallel_sizes_load_as_from_disk(tmp_path: Path) -> None:
    before, after = (meshed(keys).at(tmp_path) for keys in (TENSOR, WHOLE))

    def to_disk(engine: Any, rank: int) -> None:
        before.train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))

    attempt(before, range(2), before=to_disk)
    resumed = attempt(after, range(3), tmp_path / "disk")
    assert firsts(resumed) == {2}
    elsewhere = dataclasses.replace(after, base=tmp_path / "other")
    same(resumed, attempt(elsewhere, range(3), tmp_path / "saved"))
