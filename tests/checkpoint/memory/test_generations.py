"""Generations in the memory of hosts: what a restarted job goes on from, whatever was lost; what
stays after processes have ended, and the command that removes what jobs have left.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from typer.testing import CliRunner

import hf_zero
from hf_zero.checkpoint import host_folders, memory, verify_all, verify_checkpoint
from hf_zero.checkpoint.memory import (
    checkpoints_of,
    copy_exchange,
    folders,
    inventory,
    job_folders,
    saving,
)
from hf_zero.checkpoint.memory.choose import newest_in_memory
from hf_zero.checkpoint.memory.inventory import Generation, generation_to_keep
from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError
from hf_zero.ops import native
from tests.checkpoint import setups
from tests.checkpoint.jobs import flip as flip_at
from tests.checkpoint.memory.jobs import Kept, attempt, firsts, hosts, same, whole
from tests.checkpoint.setups import train
from tests.helpers.engines import start
from tests.helpers.ranks import RankFailed, run_ranks

__all__ = ["hosts"]

Patch = pytest.MonkeyPatch
STEPS = 3  # in all; an attempt ends after SAVED of them
SAVED = 2


def file_of(setup: Kept, host: str, rank: int, step: int = SAVED) -> Path:
    """The file of ``rank`` in the generation of ``step`` on ``host``."""
    for path in setup.folder_of(host).glob(f"slot-*/rank-{rank:05d}-*.json"):
        if json.loads(path.read_text())["step"] == step:
            return path.with_suffix(".safetensors")
    raise LookupError(f"{host} has no file of rank {rank} at step {step}")


def flip(path: Path) -> None:
    flip_at(path, path.stat().st_size // 2)


def tear_record(path: Path) -> None:
    record = path.with_suffix(".json")
    os.truncate(record, record.stat().st_size - 9)


def lost(*names: str) -> Callable[[Kept], None]:
    return lambda setup: [shutil.rmtree(setup.folder_of(host)) for host in names]


def hurt(how: Callable[[Path], None], *names: str) -> Callable[[Kept], None]:
    """The files of rank 1 on these hosts."""
    return lambda setup: [how(file_of(setup, host, 1)) for host in names]


def lost_and_hurt(setup: Kept) -> None:
    """Host b, and of the two other copies of its file the one that it would be sent."""
    lost("b")(setup)
    hurt(flip, "d")(setup)


IN_FILES = Kept(stage=2, way="optimizer in files", precision="bf16")
TWO, FOUR = Kept(stage=2), Kept(4, 3, hosts="abcd", more={"copies": 3})
OLDER = "generation of step 2 in memory is skipped"
COPY = "the copy of rank-00001-of-00004.safetensors in memory of host d is damaged"
# what happens between two attempts, the hosts of the second, the step that it resumes, what it says
LOSSES: dict[str, tuple[Kept, Callable[[Kept], Any], str, int, str]] = {
    "nothing": (IN_FILES, lost(), "ab", SAVED, ""),
    "a host of two ranks": (Kept(4, 3, hosts="aabb"), lost("b"), "aabb", SAVED, ""),
    "a bit": (Kept(stage=1), hurt(flip, "b"), "ab", SAVED, "damaged"),
    "part of a record": (TWO, hurt(tear_record, "b"), "ab", SAVED, "skipped"),
    "a host, and a bit of a copy": (FOUR, lost_and_hurt, "abcd", SAVED, COPY),
    "a bit of both copies": (TWO, hurt(flip, "a", "b"), "ab", SAVED - 1, OLDER),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_restart_goes_on_as_if_nothing_had_happened(case, tmp_path, heard_in_full):
    setup, harm, names, first, said = LOSSES[case]
    setup = setup.at(tmp_path)
    attempt(setup, range(SAVED))
    harm(setup)
    again = dataclasses.replace(setup, hosts=names)
    resumed = attempt(again, range(STEPS), tmp_path / "disk")
    assert firsts(resumed) == {first}
    same(resumed, whole(again, STEPS))
    assert not said or any(said in line for line in heard_in_full), said
    damaged = [line for line in heard_in_full if line.endswith("is damaged")]
    assert said != COPY or damaged == [COPY]


def saves_each(engine: Any, rank: int, disk: Path) -> None:
    for step in range(3):
        train(engine, rank, range(step, step + 1))
        engine.save_checkpoint(str(disk))
    engine.generations.wait()


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_saved_after_a_load_of_an_earlier_step_prevails(step: int, tmp_path: Path) -> None:
    setup, disk = Kept().at(tmp_path), tmp_path / "disk"

    def goes_back(engine: Any, rank: int) -> None:
        saves_each(engine, rank, disk)
        before = engine.generations.newest_id
        engine.load_checkpoint(str(disk), f"global_step{step}")
        train(engine, rank, range(step, step + 1))
        engine.generations.wait()
        assert engine.generations.newest_id != before, "a step that comes again is saved again"

    attempt(setup, range(1), before=goes_back)
    shutil.rmtree(disk)
    assert firsts(attempt(setup, range(4), disk)) == {step + 1}


GOOD = {"load_checkpoint": {}, "and its weights alone": {"load_module_only": True}}


@pytest.mark.parametrize("trained_before", [True, False])
@pytest.mark.parametrize("load", GOOD)
def test_a_restart_does_not_undo_a_load_of_an_earlier_checkpoint(
    load: str, trained_before: bool, tmp_path: Path
) -> None:
    """Before the next save, too. What an attempt before has left stays until then."""
    setup = Kept().at(tmp_path)

    def trains(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(setup.folder, "good")
        train(engine, rank, range(1, SAVED))

    def goes_back(engine: Any, rank: int) -> None:
        if trained_before:
            trains(engine, rank)
        engine.load_checkpoint(setup.folder, "good", **GOOD[load])

    if not trained_before:
        attempt(setup, range(0), before=trains)
    attempt(setup, range(0), before=goes_back)
    is_back = trained_before and not GOOD[load]
    resumed = attempt(setup, range(STEPS), setup.folder)
    assert firsts(resumed) == {1 if is_back else SAVED}
    same(resumed, whole(setup, STEPS))


def test_the_branch_that_was_left_is_not_resumed(tmp_path, monkeypatch):
    """After a load of an earlier step, and a clock that was set back, a process ends between the
    commit of the next generation and the removal of the later one.
    """
    monkeypatch.setattr(saving.MemoryCheckpoints, "_drop_later", lambda *_: None)
    setup = Kept(1, hosts="a").at(tmp_path)

    def save(engine, rank):
        train(engine, rank, range(1))
        engine.save_checkpoint(setup.folder, "early")
        train(engine, rank, range(1, 3))
        engine.load_checkpoint(setup.folder, "early")

    attempt(setup, range(1, 2), before=save)
    resumed = attempt(setup, range(2), tmp_path / "disk")
    assert firsts(resumed) == {2}
    monkeypatch.setattr(job_folders.time, "time_ns", lambda: 0)
    attempt(setup, range(1))
    assert firsts(attempt(setup, range(2), tmp_path / "none")) == {1}


def test_a_run_without_generations_is_not_dropped_for_the_branch_before_it(tmp_path: Path) -> None:
    """Its last save has an earlier step than what an attempt before has left in memory."""
    setup = Kept(1, hosts="a").at(tmp_path)

    def saves(engine: Any, rank: int) -> None:
        train(engine, rank, range(engine.global_steps, engine.global_steps + 1))
        engine.save_checkpoint(setup.folder)

    attempt(setup, range(4), before=saves)
    without = dataclasses.replace(setup, more={"every": None})
    assert firsts(attempt(without, range(0), setup.folder, before=saves)) == {2}
    resumed = attempt(setup, range(4), setup.folder)
    assert firsts(resumed) == {2}
    same(resumed, whole(setup, 4))


def test_generations_follow_a_save_that_was_refused(tmp_path: Path) -> None:
    """Its client state is not that of the generations."""
    setup = TWO.at(tmp_path)

    def is_refused(engine: Any, rank: int) -> None:
        engine.save_checkpoint(setup.folder, client_state={"epoch": 3})
        states: list[Any] = [{"model": object()}, [1]]
        for state in states:
            with pytest.raises(CheckpointError, match="client_state"):
                engine.save_checkpoint(setup.folder, client_state=state)

    attempt(setup, range(1), before=is_refused)
    shutil.rmtree(setup.folder)
    resumed = attempt(setup, range(2), setup.folder, before=lambda engine, _: engine)
    assert firsts(resumed) == {1}
    assert resumed[0][-1].generations.client_state == {"epoch": 3}


@pytest.mark.parametrize("tag", ["epoch/1", "..", ""])
def test_a_tag_that_no_load_would_take_is_refused(tag: str, tmp_path: Path) -> None:
    """The generation before stays."""
    setup = Kept(1, hosts="a", more={"every": 2}).at(tmp_path)

    def saves(engine: Any, rank: int) -> None:
        train(engine, rank, range(2))
        with pytest.raises(CheckpointError, match=f"'{tag}' cannot be a tag"):
            memory.save(engine, tag=tag)
        memory.save(engine, tag="epoch-1")

    attempt(setup, range(0), before=saves)
    assert firsts(attempt(setup, range(2), tmp_path / "disk")) == {2}


def test_a_script_that_changes_its_client_state_changes_no_generation(tmp_path: Path) -> None:
    """Whether it has saved or loaded that."""
    setup = TWO.at(tmp_path)

    def saves(engine: Any, rank: int) -> None:
        loss = torch.ones(2, requires_grad=True).sum()  # deepcopy takes no tensor with a graph
        state = {"losses": [0.5], "last": loss}
        engine.save_checkpoint(setup.folder, client_state=state)
        state["losses"].clear()

    def loads(engine: Any, rank: int) -> Any:
        _, state = engine.load_checkpoint(setup.folder)
        found = {"losses": list(state["losses"]), "last": state["last"].item()}
        state["losses"].clear()
        state.pop("last")
        return found

    attempt(setup, range(1), before=saves)
    for step in (2, 3):
        loaded = attempt(setup, range(step), before=loads)
        assert [found for *_, found in loaded] == [{"losses": [0.5], "last": 2.0}] * 2


def kept_aside(setup: Kept, host: str, tmp_path: Path, other: Any) -> list[Any]:
    """After an attempt and, elsewhere, ``other``, ``host`` comes back with what the first left."""
    attempt(setup, range(SAVED))
    shutil.copytree(setup.folder_of(host), tmp_path / "first")
    shutil.rmtree(setup.base)
    later = attempt(setup, range(SAVED), before=other)
    place = setup.folder_of(host)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "first", place)
    return later


def test_a_generation_of_two_attempts_is_never_mixed(tmp_path: Path) -> None:
    """Rank 1's file of the first attempt stands beside rank 0's of the second, at one step."""
    setup = Kept(more={"copies": 1}).at(tmp_path)
    kept_aside(setup, "b", tmp_path, None)
    with pytest.raises(RankFailed, match="no checkpoint in"):
        attempt(setup, range(STEPS), tmp_path / "disk")


def test_an_engine_that_has_no_generation_leaves_those_of_an_earlier_attempt(
    tmp_path: Path,
) -> None:
    """Nor does one that is built again; what an engine has loaded goes with it."""
    setup = Kept().at(tmp_path)
    attempt(setup, range(SAVED))
    attempt(setup, range(0), ends=True)

    def built_again(engine: Any, rank: int) -> None:
        engine.replace(next(iter(engine.module.children())))

    attempt(setup, range(0), before=built_again, ends=True)
    assert firsts(attempt(setup, range(0), tmp_path / "disk", built_again, ends=True)) == {SAVED}
    assert not list(setup.base.rglob("engine-*"))


CLAIMS = """
import fcntl, sys
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_living_jobs_of_one_name_are_refused(tmp_path, monkeypatch):
    """At the first save of the second, if neither has saved before."""
    monkeypatch.setattr(folders, "CLAIM_SECONDS", 0.0)
    setup = Kept().at(tmp_path)
    engine = folders.job_folder(setup.base, "job") / "b" / "engine-0"
    others: list[subprocess.Popen[bytes]] = []

    def lives(_: Any, rank: int) -> None:
        if rank == 0:
            engine.mkdir(parents=True)
            launched = [sys.executable, "-c", CLAIMS, str(engine / folders.CLAIM)]
            others.append(subprocess.Popen(launched, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert others[0].stdout is not None and others[0].stdout.readline() == b"held\n"

    with pytest.raises(RankFailed, match="rank 1: another job that is running saves into"):
        attempt(setup, range(2), before=lives)
    others[0].communicate()
    attempt(setup, range(2))
    assert firsts(attempt(setup, range(3), tmp_path / "disk")) == {2}


@pytest.mark.parametrize("linked", [False, True])
def test_folders_of_other_users_are_neither_read_nor_written(linked, tmp_path, monkeypatch):
    setup = Kept().at(tmp_path)
    attempt(setup, range(1))
    (job,) = setup.base.iterdir()
    if linked:
        job.rename(tmp_path / "theirs")
        job.symlink_to(tmp_path / "theirs")
        made = folders.job_folder(tmp_path / "deep" / "memory", "job")
        host_folders.make_own(made)
        assert made.stat().st_mode & 0o777 == 0o700
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        job.rename(folders.job_folder(setup.base, "job"))

    def looks(rank: int) -> None:
        threading.current_thread().host = setup.hosts[rank]  # type: ignore[attr-defined]
        newest_in_memory(ZeroConfig.from_dict(setup.config))

    for reads in (lambda: attempt(setup, range(0)), lambda: run_ranks(2, looks)):
        with pytest.raises(RankFailed, match="is a link" if linked else "is of the user"):
            reads()


def no_record(monkeypatch: Patch) -> None:
    """Host b cannot write the record of step 2: the save after it finds all ranks in step."""
    write, failed = copy_exchange.write_record, []

    def full(path: Path, content: bytes) -> None:
        if "/b/" in str(path) and "slot-1" in str(path) and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(copy_exchange, "write_record", full)


def no_hashes(monkeypatch: Patch) -> None:
    """The thread of rank 1 fails at step 2, before it has told the others anything."""
    hashed = copy_exchange.hashed

    def fails(staged: Any) -> Any:
        if staged.record.report.file.rank == 1 and staged.record.step == 2:
            raise TypeError("state that is no JSON")
        return hashed(staged)

    monkeypatch.setattr(copy_exchange, "hashed", fails)


def no_thread(monkeypatch: Patch) -> None:
    """The thread of rank 1 cannot start at step 2: the save after it finds all ranks in step."""
    begin, begun = threading._start_new_thread, []  # type: ignore[attr-defined]

    def refused(run: Any, *rest: Any) -> Any:
        if (run.__self__.name, threading.current_thread().name) == ("hf-zero memory", "rank-1"):
            begun.append(run)
            if len(begun) == 2:
                raise RuntimeError("can't start new thread")
        return begin(run, *rest)

    monkeypatch.setattr(threading, "_start_new_thread", refused)


def no_state(monkeypatch: Patch) -> None:
    """The state of rank 1 cannot be taken at step 2: the save after it finds all ranks in step."""
    plan = saving.plan_save

    def fails(engine: Any, *rest: Any) -> Any:
        if (engine.global_rank, engine.global_steps) == (1, 2):
            raise ValueError("no state")
        return plan(engine, *rest)

    monkeypatch.setattr(saving, "plan_save", fails)


FAULTS = [(no_record, 2, 3), (no_hashes, 1, 3), (no_thread, 2, 3), (no_state, 2, 3)]


@pytest.mark.parametrize(("fails", "copies", "last"), FAULTS)
def test_a_save_that_fails_on_one_rank_leaves_a_whole_generation(
    fails: Any, copies: int, last: int, tmp_path: Path, monkeypatch: Patch, heard_in_full: list[str]
) -> None:
    setup = Kept(more={"copies": copies}).at(tmp_path)
    with monkeypatch.context() as faults:
        fails(faults)
        attempt(setup, range(3))
    assert firsts(attempt(setup, range(4), tmp_path / "disk")) == {last}
    assert any("step 2 in memory failed on rank 1" in line for line in heard_in_full)
    others = [line for line in heard_in_full if "failed on rank 0 (a rank could not" in line]
    assert others or fails is no_hashes


def test_a_save_that_fails_after_a_load_from_disk_is_logged(
    tmp_path: Path, monkeypatch: Patch, heard_in_full: list[str]
) -> None:
    setup = TWO.at(tmp_path)

    def goes_back(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(setup.folder, tag="good")
        engine.load_checkpoint(setup.folder, tag="good")
        train(engine, rank, range(1, 3))

    with monkeypatch.context() as faults:
        no_state(faults)
        attempt(setup, range(0), before=goes_back)
    assert any("step 2 in memory failed on rank 1" in line for line in heard_in_full)
    assert firsts(attempt(setup, range(4), setup.folder)) == {3}


def test_a_run_finds_its_generations_whatever_else_it_has_saved_to(tmp_path: Path) -> None:
    setup = TWO.at(tmp_path)

    def saves(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(setup.folder)
        engine.save_checkpoint(tmp_path / "best")
        train(engine, rank, range(1, 3))

    attempt(setup, range(0), before=saves)
    assert firsts(attempt(setup, range(4), setup.folder)) == {3}


def breaks_off(setup: Kept, engine: Any, rank: int, breaks: bool = True) -> None:
    """The schedule fails in step 3; memory has step 2, the disk step 1."""
    train(engine, rank, range(1))
    engine.save_checkpoint(setup.folder)
    train(engine, rank, range(1, 2))
    engine.generations.wait()
    if breaks:
        engine.lr_scheduler.step = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError) if breaks else nullcontext():
        train(engine, rank, range(2, 3))
    engine.lr_scheduler.__dict__.pop("step", None)


@pytest.mark.parametrize("initialize", [hf_zero.initialize, deepspeed.initialize])
def test_a_load_after_a_step_that_was_broken_off_takes_the_newest_generation(
    initialize: Callable[..., Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    """On all ranks, if it was broken off on one."""
    setup = Kept(more={"every": 2}).at(tmp_path)

    def begin(model: Any, optimizer: Any, config: Any) -> Any:
        return initialize(model=model, optimizer=optimizer, config=config)[0]

    monkeypatch.setattr(setups, "start", begin)

    def loads(engine: Any, rank: int) -> None:
        breaks_off(setup, engine, rank, breaks=rank == 1)
        engine.load_checkpoint(setup.folder)

    resumed = attempt(setup, range(4), before=loads)
    assert firsts(resumed) == {2}
    same(resumed, whole(setup, 4))


def test_the_end_of_an_engine_that_was_broken_off_keeps_generations(tmp_path: Path) -> None:
    setup = Kept(more={"every": 2}).at(tmp_path)
    models = setup.models()
    saving._claimed.clear()

    def ends(rank: int) -> None:
        threading.current_thread().host = setup.hosts[rank]  # type: ignore[attr-defined]
        engine = setup.open(models[rank])
        breaks_off(setup, engine, rank)
        engine.destroy()

    run_ranks(2, ends)
    assert firsts(attempt(setup, range(3), setup.folder, ends=True)) == {2}
    assert not setup.base.exists() or not list(setup.base.iterdir()), "the next end removes them"


ROOM = {
    "of the limit": ({"limit": "100kB"}, False, r"limit is 100.00 kB; .*copies \(2\)"),
    "of it for one copy": ({"copies": 1, "limit": 200_000}, False, r"checkpoint\.memory\.limit"),
    "of the file system": ({}, False, r"has room for 1\.00 kB"),
    "that others have filled meanwhile": ({}, True, r"has room for 1\.00 kB"),
}


@pytest.mark.parametrize("case", ROOM)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Before training, or at the first save."""
    more, trains, said = ROOM[case]

    def fills(engine: Any = None, rank: int = 0) -> None:
        monkeypatch.setattr(folders, "capacity", lambda base, folder: 1000)

    if not trains and not more:
        fills()
    with pytest.raises(RankFailed, match=said):
        steps, before = (range(2), fills) if trains else (range(0), None)
        attempt(Kept(more=more).at(tmp_path), steps, before=before)


def test_machines_of_one_name_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(job_folders, "machine", lambda base: str(next(numbers)))
    with pytest.raises(RankFailed, match=r"containers call themselves a; .* HF_ZERO_HOST"):
        attempt(Kept(hosts="aa").at(tmp_path), range(0))


def test_saves_are_off_without_the_key(tmp_path: Path) -> None:
    def refused(engine: Any, rank: int) -> None:
        assert checkpoints_of(engine) is None
        with pytest.raises(CheckpointError, match=r"checkpoint\.memory\.every"):
            memory.save(engine)
        assert memory.newest(engine, tmp_path / "disk") is None

    attempt(Kept(1, hosts="a", more={"every": None}).at(tmp_path), range(0), None, refused, True)


def test_verify_reads_what_a_host_holds(tmp_path: Path) -> None:
    """Files of other hosts are no damage; a file that differs from its record is."""
    setup = Kept(4, hosts="abcd").at(tmp_path / "four")
    attempt(setup, range(SAVED))
    (job,) = setup.base.iterdir()
    found = verify_all(job)
    assert len(found) == 8 and all(verdict.whole and verdict.files == 2 for verdict in found)
    hurt = file_of(setup, "b", 1)
    flip(hurt)
    (damaged,) = (verdict for verdict in verify_all(job) if not verdict.whole)
    assert damaged.folder == hurt.parent
    assert damaged.problems[0].startswith(f"{hurt} is damaged")
    two = Kept().at(tmp_path / "two")
    attempt(two, range(2))
    verdict = verify_checkpoint(two.folder_of("a"))
    assert verdict.whole and verdict.parameters > 0
    attempt(two, range(2), tmp_path / "none")  # reads, and saves nothing
    resumed = two.folder_of("a") / "resume"
    for file in resumed.glob("*/rank-*"):
        file.unlink()
    assert {verdict.folder.name for verdict in verify_all(two.base)} == {"slot-0", "slot-1"}
    assert not verify_all(resumed)[0].whole, "where it is asked for"


def test_a_slot_in_the_middle_of_a_save_is_a_problem_of_its_verdict(tmp_path: Path) -> None:
    setup = Kept(hosts="aa", more={"copies": 1}).at(tmp_path)
    attempt(setup, range(SAVED))
    newer, older = (file_of(setup, "a", 1, step) for step in (SAVED, SAVED - 1))
    for suffix in (".safetensors", ".json"):
        shutil.copy(newer.with_suffix(suffix), older.with_suffix(suffix))
    (damaged,) = (verdict for verdict in verify_all(setup.base) if not verdict.whole)
    assert damaged.folder == older.parent
    (problem,) = damaged.problems
    assert "are of several saves; load an older generation" in problem


def test_a_slot_whose_records_go_meanwhile_is_a_problem_of_its_verdict(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A save begins between two looks of the command: at the folders, and at their files."""
    setup = Kept(1, hosts="a").at(tmp_path)
    attempt(setup, range(SAVED))

    def then_gone(folder: Path) -> bool:
        found = inventory.holds_records(folder)
        for record in folder.glob("rank-*.json"):
            record.rename(record.with_suffix(".away"))
        return found

    for verify in (verify_checkpoint, lambda base: verify_all(base)[0]):
        with monkeypatch.context() as looks:
            looks.setattr("hf_zero.checkpoint.verify.holds_records", then_gone)
            verdict = verify(setup.base)
        assert verdict.folder.name in folders.SLOTS and not verdict.whole
        assert str(verdict.folder) in verdict.problems[0]
        for away in setup.base.rglob("*.away"):
            away.rename(away.with_suffix(".json"))
    file_of(setup, "a", 0).with_suffix(".json").unlink()
    (other,) = verify_all(setup.base)
    assert other.whole, "a slot that a save overwrites is no damage"
    glob = Path.glob

    def then_removed(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        if folder.name in folders.SLOTS:
            for record in found:
                record.unlink()
        return found

    slot = next(setup.base.rglob(folders.SLOTS[0]))
    monkeypatch.setattr(Path, "glob", then_removed)
    assert inventory.time_of_newest_record(slot) == 0


def test_files_of_a_script_that_are_named_like_records_are_no_slot(tmp_path: Path) -> None:
    setup = Kept(1, hosts="a").at(tmp_path)
    attempt(setup, range(SAVED))
    slot = file_of(setup, "a", 0).parent
    logs, copied = slot.parents[1] / "logs", tmp_path / "copied"
    logs.mkdir()
    for name in ("rank-0-of-4.json", "rank-results-of-run.json", "rank-00000-of-00004.json"):
        (logs / name).write_text('{"loss": 1}')
    (slot / "rank-0-of-4.json").write_text('{"loss": 1}')
    assert verify_checkpoint(setup.base).folder == slot
    assert all(each.whole and each.folder.name in folders.SLOTS for each in verify_all(setup.base))
    shutil.copytree(slot, copied)
    assert verify_checkpoint(copied).whole and verify_checkpoint(copied).folder == copied
    assert not inventory.holds_records(logs)


def test_a_record_that_does_not_fit_its_file_is_told_with_its_path(
    tmp_path: Path, heard: list[str]
) -> None:
    setup = Kept(hosts="aa", more={"copies": 1}).at(tmp_path)
    attempt(setup, range(SAVED))
    record = file_of(setup, "a", 0).with_suffix(".json")
    other = file_of(setup, "a", 1)
    other.with_suffix(".json").write_bytes(record.read_bytes())
    os.truncate(record.with_suffix(".safetensors"), 10)
    inventory.scan([record.parents[1]])
    said = "\n".join(heard)
    assert f"{other.with_suffix('.json')} is the record of {record.stem}.safetensors" in said
    assert f"has 10 bytes, and {record} says 201600" in said


def test_ranks_agree_on_the_number_of_an_engine(tmp_path: Path) -> None:
    """The engine before, which was not destroyed, lives on rank 1 alone."""
    setup = Kept(hosts="aa").at(tmp_path)
    models = [setup.models() for _ in range(2)]
    saving._claimed.clear()

    def numbers(rank: int) -> tuple[int, int]:
        threading.current_thread().host = "a"  # type: ignore[attr-defined]
        before = setup.open(models[0][rank]).generations
        number = before.number
        if rank == 0:
            saving._claimed.pop(before.place)
        after = setup.open(models[1][rank]).generations
        return number, after.number

    assert run_ranks(2, numbers) == [(0, 1), (0, 1)]


def test_an_engine_that_is_built_again_keeps_its_number(tmp_path: Path) -> None:
    """Also if that of an engine that has ended is free."""
    setup = Kept(hosts="aa").at(tmp_path)
    models = [setup.models() for _ in range(2)]
    saving._claimed.clear()

    def numbers(rank: int) -> tuple[int, int]:
        threading.current_thread().host = "a"  # type: ignore[attr-defined]
        optimizers = [setup.optimizer(of[rank]) for of in models]
        first, second = (
            start(of[rank], optimizer, setup.config) for of, optimizer in zip(models, optimizers)
        )
        number = second.generations.number
        first.destroy()
        second.replace(next(iter(second.module.children())))
        return number, second.generations.number

    assert run_ranks(2, numbers) == [(1, 1), (1, 1)]


def test_unfreezing_before_the_load_keeps_the_generations(tmp_path: Path) -> None:
    setup = Kept().at(tmp_path)
    attempt(setup, range(SAVED))
    models = setup.models()
    saving._claimed.clear()

    def resumes(rank: int) -> int:
        threading.current_thread().host = setup.hosts[rank]  # type: ignore[attr-defined]
        frozen = [p for name, p in models[rank].named_parameters() if "h.0" in name]
        optimizer = setup.optimizer(models[rank])
        for parameter in frozen:
            parameter.requires_grad_(False)
        engine = start(models[rank], optimizer, setup.config)
        for parameter in frozen:
            parameter.requires_grad_(True)
        engine.load_checkpoint(str(tmp_path / "disk"))
        begun = engine.generations.attempt
        train(engine, rank, range(SAVED, STEPS))
        engine.generations.wait()
        loaded = int(engine.global_steps)
        engine.generations.attempt = begun + (1 << 40)  # the clock is set back
        engine.replace(next(iter(engine.module.children())))
        assert engine.generations.attempt == begun + (1 << 40)
        return loaded

    assert run_ranks(2, resumes) == [STEPS, STEPS]


# generations of steps 3 and 4, and the hosts that hold each rank's file; current_id; what is kept
KEPT = {
    "the newest": ({4: ("ab", "ab"), 3: ("ab", "ab")}, "", "4"),
    "that with its copies": ({4: ("a", "ab"), 3: ("ab", "ab")}, "", "3"),
    "that from which training goes on": ({4: ("ab", "ab"), 3: ("a", "b")}, "3", "3"),
    "one before that": ({4: ("a", "a"), 3: ("ab", "ab")}, "4", "3"),
    "the newest of those without": ({4: ("a", "a"), 3: ("b", "b")}, "", "4"),
    "one that is not whole here": ({3: ("ab", "ab")}, "4", "4"),
    "none": ({}, "", ""),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_generation_with_all_copies_is_kept(case: str) -> None:
    held, current_id, kept = KEPT[case]
    whole = [
        Generation(str(step), 1, step, 2, {rank: list(hosts) for rank, hosts in enumerate(by_rank)})
        for step, by_rank in held.items()
    ]
    assert generation_to_keep(whole, current_id, 2) == kept


def test_a_copy_of_another_save_is_not_kept(tmp_path: Path, heard_in_full: list[str]) -> None:
    """Rank 1 has counted a save that rank 0 has not made: the generation before stays."""
    setup = Kept().at(tmp_path)

    def out_of_step(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.generations.wait()
        engine.generations._saves += rank

    attempt(setup, range(4), before=out_of_step)
    assert firsts(attempt(setup, range(4), tmp_path / "disk")) == {2}
    assert any("sent the copies of another save" in line for line in heard_in_full)


# the end of a script, or those of two ranks of one host, and whether the generations stay
FAILED = "fails_to_save()\nwith suppress(CheckpointError): engine.destroy()"
ENDS = {
    "fails_to_save()": True,
    FAILED: True,
    "pass": False,
    "pass  # after an attempt that was killed, and without a save": True,
    "sys.exit('no data')": True,
    "os.kill(os.getpid(), signal.SIGTERM)": True,
    "pass | time.sleep(1); sys.exit(1)": True,
    "engine.destroy() | time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)": True,
}
ENDS_WITHOUT_CORE = {"pass": True, "sys.exit('no data')": True, "engine.destroy()": False}
LAUNCHED = """
import gc, os, signal, sys, time
from contextlib import suppress
import torch, torch._dynamo  # which the first optimizer imports
import hf_zero, hf_zero.engine, hf_zero.launch.hosts
from hf_zero.checkpoint import background_saves
from hf_zero.errors import CheckpointError

gc.freeze()  # or else the end of each process goes through all that was imported
base, ends = sys.argv[1], sys.argv[2:]
ports = [hf_zero.launch.hosts.free_port() for _ in ends]
ranks = [(number, rank, *each.split(" | ")) for number, each in enumerate(ends)
         for rank in range(each.count(" | ") + 1)]
for number, rank, *each in ranks:  # a process for each end: one import for all
    if os.fork() == 0:
        break
else:
    for _ in ranks:
        os.wait()
    os._exit(0)
end = each[rank]
if len(each) > 1:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[number]))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
memory = {"every": 1, "folder": base, "job": str(number)}
config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"memory": memory}}
killed = "killed" in end and os.fork() == 0
if "killed" in end and not killed:
    os.wait()
engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
if killed or "killed" not in end:
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.generations.wait()
if killed:
    os.kill(os.getpid(), signal.SIGKILL)


def full(*_):
    time.sleep(0.2)  # the script has ended by then
    raise OSError(28, "No space left on device")


def fails_to_save():
    background_saves.write_image = full
    engine.save_checkpoint(f"{base}-disk-{number}", blocking=False)


exec(end)
"""


@pytest.mark.parametrize("core", ["1", "0"])
def test_an_exit_code_of_0_removes_generations_and_no_other(core: str, tmp_path: Path) -> None:
    """The native core alone sees exit codes: without it destroy() removes them."""
    if core == "1" and not hasattr(native.core(), "release_at_exit"):
        pytest.skip("there is no native core that sees exit codes")
    script, base = tmp_path / "train.py", tmp_path / "memory"
    script.write_text(LAUNCHED)
    ends = ENDS if core == "1" else ENDS_WITHOUT_CORE
    launched = [sys.executable, str(script), str(base), *ends]
    environment = {**os.environ, native.SWITCH: core}
    done = subprocess.run(launched, capture_output=True, text=True, timeout=600, env=environment)
    stayed = {
        end: any(base.glob(f"hf-zero-*-{number}/*/engine-0/slot-*/*.json"))
        for number, end in enumerate(ends)
    }
    assert stayed == ends, done.stderr
    assert len(list(base.iterdir())) == sum(ends.values()), "nothing at all is left of the others"


VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RANK")
# the key, values of VARIABLES, how the identity begins, and whether it lasts
JOBS = [
    ("run/7", ["5", None, None], "run-7", True),
    (None, ["5", "x", None], "slurm-5", True),
    (None, [None, "x y", None], "run-x-y", True),
    (None, [None, "none", "0"], f"launcher-{os.getppid()}-", True),
    (None, [None, None, None], f"process-{os.getpid()}-", False),
]


def test_a_job_is_known_by_what_its_restarts_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, values, job, lasting in JOBS:
        for name, value in zip(VARIABLES, values):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        found, lasts = host_folders.job_identity(asked)
        assert found.startswith(job) and lasts == lasting
        assert host_folders.job_identity(asked)[0] == found, "it is the same at each call"


def test_jobs_of_different_names_have_different_folders() -> None:
    names = ["实验一", "实验二", "lr 0.1", "lr:0.1", "lr-0.1", "-", *("x" * 100 + c for c in "ab")]
    made = [host_folders.job_identity(name)[0] for name in names]
    assert len({*made}) == len(names)
    assert made[4] == "lr-0.1", "a name that is a path component stays"
    assert all(
        host_folders.plain(component) == component for component in made if len(component) <= 100
    )


def left(base: Path, job: str) -> Path:
    folder = folders.job_folder(base, job)
    slot = folder / "host" / "engine-0" / "slot-0"
    slot.mkdir(parents=True)
    (slot / "rank-00000-of-00001.safetensors").write_bytes(bytes(1000))
    return folder


def test_clean_names_what_jobs_have_left_and_removes_what_none_uses(tmp_path: Path) -> None:
    old, live = left(tmp_path, "old"), left(tmp_path, "live")
    (tmp_path / "hf-zero-other").mkdir()
    mark = folders.InUse(live)

    def clean(folder: Path, *options: str) -> str:
        told = CliRunner().invoke(app, ["clean", "--folder", str(folder), *options])
        assert told.exit_code == 0, told.output
        return told.output

    def states(*options: str) -> dict[str, str]:
        rows = json.loads(clean(tmp_path, "--json", *options))
        assert all(row["bytes"] == 1000 for row in rows)
        return {Path(row["folder"]).name: row["state"] for row in rows}

    assert states() == {old.name: "left", live.name: "in use"}
    assert old.exists()
    assert states("--remove") == {old.name: "removed", live.name: "in use"}
    assert not old.exists() and live.exists() and (tmp_path / "hf-zero-other").exists()
    mark.close()
    assert states() == {live.name: "left"}
    assert "1 of them can go" in clean(tmp_path)
    (tmp_path / "empty").mkdir()
    assert clean(tmp_path / "empty") == f"no checkpoints in memory in {tmp_path / 'empty'}\n"


def test_clean_takes_no_mark_that_is_not_a_file(tmp_path: Path) -> None:
    def remove() -> Any:
        return CliRunner().invoke(app, ["clean", "--folder", str(tmp_path), "--remove"])

    makes = (
        lambda mark: mark.symlink_to(tmp_path / "made"),
        os.mkfifo,
        os.mkdir,
    )
    job = left(tmp_path, "a")
    for make in makes:
        make(job / folders.IN_USE)
        done = remove()
        assert isinstance(done.exception, CheckpointError), done.output
        assert "in-use is no regular file" in str(done.exception)
        assert not (tmp_path / "made").exists()
        mark = job / folders.IN_USE
        mark.rmdir() if mark.is_dir() else mark.unlink()
    if os.getuid() == 0:  # another user's folder of this user's name
        os.chown(job, 65534, 65534)
        assert remove().exit_code == 0 and job.exists()


def test_a_mount_point_with_a_space_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("disk / ext4 rw 0 0\nram /mnt/ram\\040disk tmpfs rw 0 0\n")
    monkeypatch.setattr(host_folders, "MOUNTS", mounts)
    assert host_folders.is_in_memory(Path("/mnt/ram disk/job"))
    assert not host_folders.is_in_memory(Path("/mnt/ram/job"))
