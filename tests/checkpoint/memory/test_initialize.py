"""``initialize(resume=...)`` and loads of scripts whose generations are in memory; ranks that share
layers, experts or shards, and stages; saves on disk that a thread takes from a generation, without
a second copy of the state.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed.checkpoint as dcp

import hf_zero
from hf_zero import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from hf_zero.checkpoint import staging, verify_checkpoint
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.memory import checkpoints_of, folders, saving
from hf_zero.checkpoint.memory.choose import newest_in_memory
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError
from tests.checkpoint.memory.jobs import Kept, attempt, firsts, hosts, same, whole
from tests.checkpoint.memory.test_generations import flip
from tests.checkpoint.setups import held
from tests.checkpoint.test_resume import Rows, config, net, train
from tests.helpers.engines import full_weights
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed
from tests.helpers.stacks import on_ranks
from tests.parallel import pipelines

__all__ = ["held", "hosts"]


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


def alone(initialize: Callable[..., Any] = hf_zero.initialize, **how: Any) -> Any:
    """An engine of the next attempt in this process, on host a."""
    saving._claimed.clear()
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    return initialize(model=net(), **how)[0]


def trained(settings: dict[str, Any], **how: Any) -> Any:
    """Steps and engine of an attempt in this process that has saved."""
    saving._claimed.clear()
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    steps, engine = train(0, net(), settings, Rows(), **how)
    engine.generations.wait()
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
            if (checkpoints := checkpoints_of(engine)) is not None:
                checkpoints.wait()
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


def named(settings: dict[str, Any], folder: Path) -> Any:
    return alone(config=settings, resume=folder)


def in_folder(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    return settings | {"checkpoint": settings["checkpoint"] | {"folder": str(folder)}}


def configured(settings: dict[str, Any], folder: Path) -> Any:
    return alone(config=in_folder(settings, folder), resume="latest")


def loaded(settings: dict[str, Any], folder: Path) -> Any:
    engine = alone(config=settings)
    with suppress(CheckpointError):
        engine.load_checkpoint(folder)
    return engine


@pytest.mark.parametrize("asks", [named, configured, loaded])
@pytest.mark.parametrize("knows", ["resume", "configuration", "save", "load", "nothing"])
def test_a_run_resumes_from_no_generation_of_another_folder(
    knows: str, asks: Callable[..., Any], tmp_path: Path, heard_in_full: list[str]
) -> None:
    """Of one job, as the runs of a sweep are. A run whose folder is not known may be any."""
    base, first = settings_of(tmp_path, on_disk=False), tmp_path / "first"
    if knows == "load":
        train(0, net(), config(first), Rows(), saves={1}, stop=1)
    of_first = in_folder(base, first) if knows == "configuration" else base
    engine = alone(config=of_first, resume=first if knows == "resume" else None)
    if knows == "save":
        engine.save_checkpoint(first)
    if knows == "load":
        engine.load_checkpoint(first)
    own = engine.global_steps + 1
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.generations.wait()
    other = asks(base, tmp_path / "second")
    assert other.global_steps == (own if knows == "nothing" else 0)
    assert sum("not taken for" in line for line in heard_in_full) == (knows != "nothing")
    assert asks(base, tmp_path / "second" / ".." / "first").global_steps == own


def test_a_chosen_generation_is_in_use_until_it_is_loaded(tmp_path: Path) -> None:
    """A command that cleans the host removes it neither before there is an engine nor after."""
    settings = settings_of(tmp_path, on_disk=False)
    del settings["scheduler"]
    trained(settings, stop=1)
    saving._claimed.clear()
    gc.collect()
    (job,) = (tmp_path / "memory").iterdir()
    assert not folders.is_in_use(job)
    found, states = newest_in_memory(ZeroConfig.from_dict(settings)), []
    assert found is not None and folders.is_in_use(job)
    del found
    assert not folders.is_in_use(job)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        states.append(folders.is_in_use(job))
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    engine = alone(config=settings, lr_scheduler=schedule, resume=tmp_path / "none")
    assert states and all(states) and engine.global_steps == 1
    engine.destroy()
    assert not job.exists(), "no mark is left"


class Other(torch.nn.Module):
    """A model of the same job with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Parameter(torch.ones(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.other


@pytest.mark.parametrize("world", [1, 2])
def test_a_generation_of_another_model_is_skipped(
    world: int, tmp_path: Path, heard_in_full: list[str]
) -> None:
    """For the checkpoint on disk, by ``initialize`` as by a load; without one it is named."""
    settings, disk = settings_of(tmp_path), tmp_path / "run"
    plain = config(disk)
    on_hosts(world, "ab", lambda rank, model: train(rank, model, plain, Rows(), (1,), stop=1))

    def of_another(rank: int, model: Any) -> None:
        engine = hf_zero.initialize(model=model, config=settings)[0]
        for _ in range(3 * engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.generations.wait()

    on_hosts(world, "ab", of_another, Other)

    def resumes(rank: int, model: Any) -> Any:
        engine = hf_zero.initialize(model=model, config=settings, resume=disk)[0]
        return engine.global_steps, full_weights(engine)

    def loads(rank: int, model: Any) -> Any:
        engine = hf_zero.initialize(model=model, config=settings)[0]
        engine.load_checkpoint(disk)
        return engine.global_steps, full_weights(engine)

    resumed, loaded = (on_hosts(world, "ab", way) for way in (resumes, loads))
    for (step, weights), (_, others) in zip(resumed, loaded):
        assert step == 1 and all(torch.equal(weights[name], others[name]) for name in others)
    skipped = [line for line in heard_in_full if "in memory is skipped" in line]
    assert len(skipped) >= 4 and all("0.weight" in line for line in skipped)
    shutil.rmtree(disk)
    with pytest.raises((CheckpointError, RankFailed), match="other"):
        on_hosts(world, "ab", resumes)


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


def test_damage_on_disk_bars_no_generation_in_memory(tmp_path: Path, heard: list[str]) -> None:
    """Whoever asks; what is damaged is raised only if memory has nothing either."""
    settings, disk = settings_of(tmp_path), tmp_path / "run"
    trained(settings, saves={1, 2}, stop=3)
    for file in list(disk.glob("global_step*/rank-*")):
        file.unlink()
    engine = alone(config=settings, resume="latest")
    assert (engine.global_steps, engine.resumed_from.startswith(str(disk))) == (3, False)
    (disk / "latest").write_text("gone")
    engine = alone(config=settings)
    engine.load_checkpoint(disk)
    assert engine.global_steps == 3
    assert sum("looking in the memory of the hosts" in line for line in heard) == 2
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(CheckpointError, match="global_step2"):
        alone(config=settings, resume="latest")
    engine = alone(config=settings)
    with pytest.raises(CheckpointError, match="no checkpoint 'gone'"):
        engine.load_checkpoint(disk)


@pytest.mark.parametrize("initialize", [hf_zero.initialize, deepspeed.initialize])
def test_a_folder_that_is_a_checkpoint_of_another_program_is_the_one_meant(
    initialize: Callable[..., Any], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path)
    trained(settings, stop=2)
    dcp.save({"model": net().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    engine = alone(initialize, config=settings)
    path, _ = engine.load_checkpoint(tmp_path / "dcp", load_optimizer_states=False)
    assert (path, engine.global_steps) == (str(tmp_path / "dcp"), 0)
    path, _ = engine.load_checkpoint(tmp_path / "run")
    assert (str(tmp_path / "memory") in path, engine.global_steps) == (True, 2)


@pytest.mark.parametrize("name", [".", "../global_step1", "../link", ""])
def test_a_checkpoint_is_the_one_meant_however_it_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder = settings_of(tmp_path), tmp_path / "run" / "global_step1"
    trained(settings, saves={1}, stop=2)
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    engine = alone(config=settings, resume=name or folder)
    assert (engine.global_steps, Path(engine.resumed_from).samefile(folder)) == (1, True)


PARTS = [{"load_module_only": True}, {"load_optimizer_states": False}]


@pytest.mark.parametrize("initialize", [hf_zero.initialize, deepspeed.initialize])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_load_of_weights_alone_is_of_the_folder(
    part: dict[str, Any], initialize: Callable[..., Any], tmp_path: Path
) -> None:
    """Memory has later ones, of a run that has ended."""
    settings, folder = settings_of(tmp_path, on_disk=False), tmp_path / "pretrained"
    _, engine = trained(settings, stop=1)
    engine.save_checkpoint(folder)
    saved = {name: p.clone() for name, p in full_weights(engine).items()}
    trained(settings, stop=2)
    engine = alone(initialize, config=settings)
    path, _ = engine.load_checkpoint(folder, **part)
    assert path == str(folder / "global_step1")
    weights = full_weights(engine)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


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
        engine.generations.wait()

    def second(rank: int, model: Any) -> list[float]:
        engine = hf_zero.initialize(model=model, config=settings, resume="latest")[0]
        assert engine.global_steps == 1
        return model.seen.tolist()

    on_hosts(2, "ab", first, build)
    assert on_hosts(2, "ab", second, build) == [[1.0, 1.0]] * 2


EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SECONDARY = {"zero_optimization": {"zero_hpz_partition_size": 2}}
SHARED = {
    "layers": Kept(model="llama", keys={"tensor_parallel": {"autotp_size": 2}}, together=2),
    "experts": Kept(model="mixtral", keys=EXPERTS),
    "secondary shards": Kept(4, model="llama", hosts="aabb", keys=SECONDARY),
}


@pytest.mark.parametrize("row", SHARED)
def test_a_restart_without_a_host_is_exact(row: str, tmp_path: Path) -> None:
    setup = SHARED[row].at(tmp_path)
    attempt(setup, range(2))
    shutil.rmtree(setup.folder_of("b"))
    resumed = attempt(setup, range(3), tmp_path / "disk")
    assert firsts(resumed) == {2}
    same(resumed, whole(setup, 3))


def in_stages(rank: int, tmp_path: Path) -> Any:
    """Three attempts of one job in two stages: uninterrupted, ended, and resumed without a host."""
    os.environ["HF_ZERO_HOST"] = "ab"[rank]
    made = []
    for base, steps, resumes in (("other", 3, False), ("memory", 2, False), ("memory", 3, True)):
        saving._claimed.clear()  # the engines of the attempt before are gone with its processes
        memory = {"every": 1, "folder": str(tmp_path / base), "job": "job"}
        keys = pipelines.config(4, 1, checkpoint={"memory": memory})
        made_of = {"model": pipelines.pipeline(2, 2), "optimizer": pipelines.sgd}
        engine = hf_zero.initialize(**made_of, config=keys)[0]
        if resumes:
            if rank == 1:
                shutil.rmtree(engine.generations.folder(engine.generations.base))
            engine.load_checkpoint(str(tmp_path / "disk"))
        first = engine.global_steps
        data = pipelines.batches(4 * steps)
        windows = [iter(data[4 * step : 4 * step + 4]) for step in range(first, steps)]
        losses = [float(engine.train_batch(window)) for window in windows]
        weights = {name: p.detach().clone() for name, p in full_weights(engine).items()}
        engine.generations.wait()
        made.append((first, losses, weights, None))
    return made


@pytest.mark.long
def test_stages_of_a_pipeline_resume(tmp_path: Path) -> None:
    uninterrupted, _, resumed = zip(*run_processes(2, in_stages, tmp_path))
    assert firsts(resumed) == {2}
    same(resumed, uninterrupted)


COPIES: list[str] = []  # files that saves on disk have copied to staging memory


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves on disk note the copies that they make of the state."""
    copy = staging.copy_to_memory
    COPIES.clear()

    def noted(memory: torch.Tensor, plan: Any, *rest: Any) -> None:
        COPIES.append(f"{plan.size} bytes")
        copy(memory, plan, *rest)

    monkeypatch.setattr(staging, "copy_to_memory", noted)


def files(engine: Any, rank: int) -> set[int]:
    """The inodes of this rank's files in both slots."""
    folder = engine.generations.folder(engine.generations.base)
    found = folder.glob(f"slot-*/rank-{rank:05d}-*.safetensors")
    return {path.stat().st_ino for path in found}


def test_a_generation_is_written_to_disk_while_later_ones_are_made(
    tmp_path: Path, held: threading.Event
) -> None:
    """The thread writes once both slots have been overwritten."""
    setup = Kept(stage=3, way="all in files").at(tmp_path)
    trained = threading.Barrier(setup.ranks, timeout=60)

    def to_disk(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.generations.wait()
        before = files(engine, rank)
        setup.train(engine, rank, range(2, 4))
        engine.generations.wait()
        assert files(engine, rank) == before, "each slot's file is overwritten in place"
        state = {"step": 4}
        engine.save_checkpoint(str(tmp_path / "run"), client_state=state, blocking=False)
        state["step"] = 5
        setup.train(engine, rank, range(4, 6))
        engine.generations.wait()
        assert len(files(engine, rank) & before) == 1, "the file that is read stays as it is"
        trained.wait()
        held.set()
        engine.wait_for_checkpoint()
        for thread in threading.enumerate():
            if thread.name == "hf-zero save":
                thread.join()
        own, lines = f"/rank-{rank:05d}-", Path("/proc/self/maps").read_text().splitlines()
        maps = [line for line in lines if f"{setup.base}/" in line and own in line]
        assert len(maps) >= 2
        assert not [line for line in maps if "(deleted)" in line], "what was written takes no room"

    attempt(setup, range(6), before=to_disk)
    assert not COPIES
    assert verify_checkpoint(tmp_path / "run").problems == ()

    def loads(engine: Any, rank: int) -> Any:
        return engine.load_checkpoint(str(tmp_path / "run"), "global_step4")[1]

    elsewhere = dataclasses.replace(setup, base=tmp_path / "third")
    resumed = attempt(elsewhere, range(7), before=loads)
    assert [said for *_, said in resumed] == [{"step": 4}] * setup.ranks
    same([(4, *rest) for _, *rest in resumed], whole(setup, 7))


def test_without_room_for_a_third_file_a_generation_is_left_out(
    tmp_path: Path,
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    heard_in_full: list[str],
) -> None:
    setup = Kept(1, 2, hosts="a").at(tmp_path)

    def to_disk(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "run"), blocking=False)
        monkeypatch.setattr(folders, "free", lambda base: 1000)
        setup.train(engine, rank, range(2, 4))  # of step 4: its slot is being read
        engine.generations.wait()
        held.set()
        engine.wait_for_checkpoint()

    attempt(setup, range(4), before=to_disk)
    failed = [line for line in heard_in_full if "step 4 in memory failed" in line]
    assert "no room for a third" in failed[0]
    assert verify_checkpoint(tmp_path / "run").problems == ()
    assert firsts(attempt(setup, range(4), tmp_path / "run")) == {3}


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The data of each rank's file, behind its header (which names the save)."""
    files = {path.name: path.read_bytes() for path in folder.glob("rank-*")}
    return {name: data[8 + int.from_bytes(data[:8], "little") :] for name, data in files.items()}


def nothing(engine: Any, rank: int) -> None:
    """The state is that of the generation."""


def weights(engine: Any, rank: int) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1.0)


def moments(engine: Any, rank: int) -> None:
    parameter = next(iter(engine.module.parameters()))
    found = safe_get_full_optimizer_state(parameter, "exp_avg")
    safe_set_full_optimizer_state(parameter, found + 1.0, "exp_avg")


def generator(engine: Any, rank: int) -> None:
    random.random()


CHANGES = [(nothing, False), (weights, True), (moments, True), (generator, True)]


def test_what_is_saved_is_the_state_of_the_call(tmp_path: Path) -> None:
    """A generation that differs is not taken, nor one that another save on disk has taken."""
    setup = Kept(1, 2, hosts="a").at(tmp_path)

    def saves(engine: Any, change: Callable[[Any, int], None], copies: bool) -> None:
        folders = [str(tmp_path / f"{name} {change.__name__}") for name in ("beside", "plain")]
        change(engine, 0)
        COPIES.clear()
        engine.save_checkpoint(folders[0], blocking=False)
        engine.wait_for_checkpoint()
        assert bool(COPIES) == copies, change.__name__
        engine.save_checkpoint(folders[1], blocking=True)
        beside, plain = (next(Path(folder).glob("global_step*")) for folder in folders)
        assert tensors_of(beside) == tensors_of(plain), change.__name__
        first, second = (read_manifest(each / "manifest.json") for each in (beside, plain))
        assert first.save_id != second.save_id
        first, second = (
            dataclasses.replace(each, save_id="", files=()) for each in (first, second)
        )
        assert first == second, change.__name__

    def run(engine: Any, rank: int) -> None:
        for step, (change, copies) in enumerate(CHANGES):
            setup.train(engine, rank, range(step, step + 1))
            engine.generations.wait()
            saves(engine, change, copies)
        setup.train(engine, rank, range(step, step + 1))
        engine.save_checkpoint(str(tmp_path / "first"), blocking=False)
        engine.wait_for_checkpoint()

        def twice(engine: Any, rank: int) -> None:
            """Another save on disk has taken the generation."""

        saves(engine, twice, True)

    attempt(setup, range(0), before=run)


def test_a_copy_for_a_save_on_disk_ends_with_a_load(tmp_path: Path) -> None:
    """The step comes again with other state: its generation has a save_id of its own."""
    setup = Kept(1, 2, hosts="a").at(tmp_path)

    def run(engine: Any, rank: int) -> None:
        kept, folder = engine.generations, str(tmp_path / "run")
        kept.leave_saves_to_trainer()
        engine.save_checkpoint(str(tmp_path / "begin"))
        setup.train(engine, rank, range(2))
        engine.save_checkpoint(folder, blocking=False)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(str(tmp_path / "begin"))
        setup.train(engine, rank, range(2))
        hf_zero.checkpoint.memory.save(engine)
        kept.wait()
        (saved,) = Path(folder).glob("global_step*")
        assert kept.newest_id not in ("", read_manifest(saved / "manifest.json").save_id)

    attempt(setup, range(0), before=run)
