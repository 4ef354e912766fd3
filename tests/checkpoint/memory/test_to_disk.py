"""Saves on disk that a thread takes from a generation in memory: no second copy of the state."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from hf_zero.checkpoint import memory, save_job, verify_checkpoint
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.memory import folders, saving
from tests.checkpoint.memory.jobs import Kept, attempt, firsts, hosts, same, whole
from tests.checkpoint.setups import held

__all__ = ["held", "hosts"]

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


def files(engine: Any, rank: int) -> set[int]:
    """The inodes of this rank's files in both slots."""
    folder = engine.memory.folder(engine.memory.base)
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


@pytest.mark.parametrize(("draws", "copies"), [(False, 1), (True, 2)])
def test_a_route_that_saves_on_disk_first_copies_the_state_once(
    draws: bool, copies: int, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random number in between makes a second copy."""
    setup = Kept(more={"every": 2}).at(tmp_path)
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
        saved.wait()
        held.set()
        engine.wait_for_checkpoint()

    attempt(setup, range(2), before=routed)
    assert not COPIES and len(staged) == copies * setup.ranks
    assert verify_checkpoint(tmp_path / "run").problems == ()

    def beside(engine: Any, rank: int) -> str:
        folder = engine.memory.folder(engine.memory.base)
        return (folder / "resume" / "trainer_state.json").read_text()

    resumed = attempt(setup, range(4), tmp_path / "disk", before=beside)
    assert [(first, said) for first, *_, said in resumed] == [(2, "{}")] * 2
    same(resumed, whole(setup, 4))
    elsewhere = dataclasses.replace(setup, base=tmp_path / "third")
    same(attempt(elsewhere, range(4), tmp_path / "run"), whole(setup, 4))


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
        engine.memory.wait()
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
        first, second = (Manifest.read(each / "manifest.json") for each in (beside, plain))
        assert first.save_id != second.save_id
        first, second = (
            dataclasses.replace(each, save_id="", files=()) for each in (first, second)
        )
        assert first == second, change.__name__

    def run(engine: Any, rank: int) -> None:
        for step, (change, copies) in enumerate(CHANGES):
            setup.train(engine, rank, range(step, step + 1))
            engine.memory.wait()
            saves(engine, change, copies)
        setup.train(engine, rank, range(step, step + 1))
        engine.save_checkpoint(str(tmp_path / "first"), blocking=False)
        engine.wait_for_checkpoint()

        def twice(engine: Any, rank: int) -> None:
            """Another save on disk has taken the generation."""

        saves(engine, twice, True)

    attempt(setup, range(0), before=run)
