"""Saves on disk that a thread takes from a generation in memory: no second copy of the state."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from upath import UPath

from hf_zero import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from hf_zero.checkpoint import memory, save_job, verify_checkpoint
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.memory import folders, saving
from tests.checkpoint.memory.jobs import Kept, attempt, heard, hosts, same
from tests.checkpoint.test_async_save import held, tensors_of
from tests.checkpoint.test_object_store import store
from tests.helpers.cells import fast

__all__ = ["heard", "held", "hosts", "store"]

COPIES: list[str] = []  # files that saves on disk have copied to staging memory


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves on disk note the copies that they make of the state."""
    copy = save_job.copy_to_memory
    COPIES.clear()

    def noted(memory: torch.Tensor, plan: Any, *rest: Any) -> None:
        COPIES.append(f"{plan.size} bytes")
        copy(memory, plan, *rest)

    monkeypatch.setattr(save_job, "copy_to_memory", noted)


def placed(setup: Kept, tmp_path: Path) -> Kept:
    (tmp_path / "disk").mkdir(parents=True)
    return dataclasses.replace(setup, folder=tmp_path / "disk", base=tmp_path / "memory")


ROWS = [
    Kept(stage=2),
    Kept(stage=3, way="all in files"),
    Kept(stage=1, way="optimizer on cpu", precision="bf16"),
    Kept(stage=3, ranks=4, hosts="aabb"),
]


@pytest.mark.parametrize(
    "setup", fast(ROWS, lambda setup: setup.ranks == 2), ids=lambda setup: f"stage {setup.stage}"
)
def test_a_generation_is_written_to_disk_while_later_ones_are_made(
    setup: Kept, tmp_path: Path, held: threading.Lock
) -> None:
    """The thread writes once both slots have been overwritten."""
    setup = placed(setup, tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(8))
    held.acquire()
    trained = threading.Barrier(setup.ranks, timeout=60)

    def files(engine: Any, rank: int) -> set[int]:
        name = f"rank-{rank:05d}-*.safetensors"
        folder = engine.memory.folder(engine.memory.base)
        return {path.stat().st_ino for path in folder.glob(f"slot-*/{name}")}

    def to_disk(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.memory.wait()
        before = files(engine, rank)
        setup.train(engine, rank, range(2, 4))
        engine.memory.wait()
        assert files(engine, rank) == before, "each slot's file is overwritten in place"
        state = {"step": 4}
        engine.save_checkpoint(str(tmp_path / "run"), client_state=state, blocking=False)
        state["step"] = 5
        setup.train(engine, rank, range(4, 6))
        engine.memory.wait()
        assert len(files(engine, rank) & before) == 1, "the file that is read stays as it is"
        if trained.wait() == 0:
            held.release()
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
    resumed = attempt(elsewhere, range(8), before=loads)
    assert [said for *_, said in resumed] == [{"step": 4}] * setup.ranks
    same([(4, *rest) for _, *rest in resumed], whole)


@pytest.mark.parametrize(("draws", "copies"), [(False, 1), (True, 2)])
def test_a_route_that_saves_on_disk_first_copies_the_state_once(
    draws: bool, copies: int, tmp_path: Path, held: threading.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random number in between makes a second copy, which leaves the file that is being written
    alone.
    """
    setup = placed(Kept(more={"every": 2}), tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(5))
    held.acquire()
    saved = threading.Barrier(setup.ranks, timeout=60)
    staged: list[int] = []
    copy = saving.copy_to_memory

    def noted(*given: Any) -> None:
        staged.append(1)
        copy(*given)

    monkeypatch.setattr(saving, "copy_to_memory", noted)

    def routed(engine: Any, rank: int) -> None:
        engine.memory.by_route = True
        setup.train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "run"), blocking=False)
        if draws:
            torch.rand(1, generator=None)
        memory.save(engine, {"trainer_state.json": b"{}"})
        engine.memory.wait()
        if saved.wait() == 0:
            held.release()
        engine.wait_for_checkpoint()

    attempt(setup, range(2), before=routed)
    assert not COPIES and len(staged) == copies * setup.ranks
    assert verify_checkpoint(tmp_path / "run").problems == ()

    def beside(engine: Any, rank: int) -> str:
        folder = engine.memory.folder(engine.memory.base)
        return (folder / "resume" / "trainer_state.json").read_text()

    resumed = attempt(setup, range(5), tmp_path / "disk", before=beside)
    assert [(first, said) for first, *_, said in resumed] == [(2, "{}")] * 2
    same(resumed, whole)
    elsewhere = dataclasses.replace(setup, base=tmp_path / "third")
    same(attempt(elsewhere, range(5), tmp_path / "run"), whole)


def test_a_generation_is_written_to_an_object_store(tmp_path: Path, store: UPath) -> None:
    setup = placed(Kept(stage=2), tmp_path)

    def to_store(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.save_checkpoint(str(store), blocking=False)
        engine.wait_for_checkpoint()

    whole = attempt(setup, range(4), before=to_store)
    assert not COPIES and verify_checkpoint(str(store)).problems == ()
    elsewhere = dataclasses.replace(setup, base=tmp_path / "other")
    resumed = attempt(elsewhere, range(4), store)
    assert [first for first, *_ in resumed] == [2, 2]
    same(resumed, whole)


def test_without_room_for_a_third_file_a_generation_is_left_out(
    tmp_path: Path, held: threading.Lock, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    setup = placed(Kept(stage=2, ranks=1, hosts="a"), tmp_path)
    held.acquire()

    def to_disk(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "run"), blocking=False)
        monkeypatch.setattr(folders, "free", lambda base: 1000)
        setup.train(engine, rank, range(2, 4))  # of step 4: its slot is being read
        engine.memory.wait()
        held.release()
        engine.wait_for_checkpoint()

    attempt(setup, range(4), before=to_disk)
    assert any(
        "step 4 in memory failed" in line and "no room for a third" in line for line in heard
    )
    assert verify_checkpoint(tmp_path / "run").problems == ()
    assert [first for first, *_ in attempt(setup, range(4), tmp_path / "run")] == [3]


def nothing(engine: Any) -> None:
    """The state is that of the generation."""


def weights(engine: Any) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1.0)


def moments(engine: Any) -> None:
    parameter = next(iter(engine.module.parameters()))
    found = safe_get_full_optimizer_state(parameter, "exp_avg")
    safe_set_full_optimizer_state(parameter, found + 1.0, "exp_avg")


def generator(engine: Any) -> None:
    random.random()


def twice(engine: Any) -> None:
    """Another save on disk has taken the generation."""
    engine.save_checkpoint(os.path.join(engine.where, "first"), blocking=False)
    engine.wait_for_checkpoint()


@pytest.mark.parametrize(
    ("change", "copies"),
    [(nothing, False), (weights, True), (moments, True), (generator, True), (twice, True)],
)
def test_what_is_saved_is_the_state_of_the_call(
    change: Callable[[Any], None], copies: bool, tmp_path: Path
) -> None:
    """Equal to a blocking save at the same moment; a generation that differs is not taken."""
    setup = placed(Kept(stage=2, ranks=1, hosts="a"), tmp_path)

    def saves(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.where = tmp_path
        change(engine)
        assert not COPIES
        engine.save_checkpoint(str(tmp_path / "beside"), blocking=False)
        engine.wait_for_checkpoint()
        engine.save_checkpoint(str(tmp_path / "plain"), blocking=True)

    attempt(setup, range(2), before=saves)
    assert bool(COPIES) == copies
    beside, plain = (tmp_path / name / "global_step2" for name in ("beside", "plain"))
    assert tensors_of(beside) == tensors_of(plain)
    first, second = (Manifest.read(folder / "manifest.json") for folder in (beside, plain))
    assert first.save_id != second.save_id
    assert dataclasses.replace(first, save_id="", files=()) == dataclasses.replace(
        second, save_id="", files=()
    )
