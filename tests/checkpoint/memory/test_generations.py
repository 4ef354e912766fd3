"""Generations in the memory of hosts: what a restarted job goes on from, whatever was lost."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import hf_zero
from hf_zero.checkpoint import memory, verify_all, verify_checkpoint
from hf_zero.checkpoint.memory import folders, job_folders, saving
from hf_zero.checkpoint.memory import resume as resume_of
from hf_zero.checkpoint.memory.resume import newest_in_memory
from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.config import ZeroConfig
from hf_zero.distributed.host_transfers import HostTransfers
from hf_zero.errors import CheckpointError
from hf_zero.measures.metrics_file import read_metrics
from tests.checkpoint.memory.jobs import Kept, Meshed, attempt, heard, hosts, same
from tests.checkpoint.test_engine import global_losses, train
from tests.checkpoint.test_resume import Rows, config, log, net
from tests.checkpoint.test_resume import train as resuming
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.stacks import on_ranks

__all__ = ["heard", "hosts", "log"]


def with_folders(setup: Kept, tmp_path: Path) -> Kept:
    (tmp_path / "disk").mkdir(parents=True)
    return dataclasses.replace(setup, folder=tmp_path / "disk", base=tmp_path / "memory")


ROWS = [Kept(stage=stage) for stage in range(4)]


@pytest.mark.parametrize("setup", ROWS, ids=lambda setup: f"stage {setup.stage}")
def test_a_restart_goes_on_as_if_nothing_had_happened(setup: Kept, tmp_path: Path) -> None:
    setup = with_folders(setup, tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(3))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert [first for first, *_ in resumed] == [3, 3]
    same(resumed, whole)


def test_the_files_of_a_lost_host_come_from_their_copies(tmp_path: Path) -> None:
    setup = with_folders(Kept(ranks=4, hosts="aabb"), tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(3))
    shutil.rmtree(setup.folder_of("b"))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert [first for first, *_ in resumed] == [3] * 4
    same(resumed, whole)


@pytest.mark.parametrize("name", ["b", "c"], ids=["same name", "new name"])
def test_a_pod_that_starts_on_another_machine_has_its_files_from_copies(
    name: str, tmp_path: Path
) -> None:
    """Its memory is empty, whatever its name."""
    setup = with_folders(Kept(), tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(3))
    shutil.rmtree(setup.folder_of("b"))
    again = dataclasses.replace(setup, hosts=f"a{name}")
    resumed = attempt(again, range(6), tmp_path / "disk")
    assert [begins for begins, *_ in resumed] == [3, 3]
    same(resumed, whole)
    assert (again.folder_of(name) / "slot-0").is_dir()


def saved(setup: Kept, tmp_path: Path, steps: int = 3) -> list[Any]:
    """Run the job to the end and, elsewhere, up to the end of ``steps``; return the results of the
    former.
    """
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(steps))
    return whole


MORE = [
    Kept(stage=1, precision="fp16", way="optimizer on cpu", model="bert"),
    Kept(stage=2, way="optimizer in files", precision="bf16"),
    Kept(stage=3, way="all in files"),
    Kept(stage=3, ranks=1, hosts="a"),
    Kept(stage=3, ranks=4, hosts="abab", more={"copies": 3}),
]


@pytest.mark.parametrize(
    "setup",
    fast(MORE, lambda setup: setup.way == "optimizer in files"),
    ids=lambda setup: f"{setup.ranks} ranks stage {setup.stage} {setup.way or 'device'}",
)
def test_a_restart_is_exact_wherever_the_state_lies(setup: Kept, tmp_path: Path) -> None:
    setup = with_folders(setup, tmp_path)
    whole = saved(setup, tmp_path)
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {3}
    same(resumed, whole)


@pytest.mark.parametrize(("ranks", "hosts_of"), [(1, "a"), (4, "abcd")])
def test_other_numbers_of_ranks_and_hosts_go_on(ranks: int, hosts_of: str, tmp_path: Path) -> None:
    """Two ranks on two hosts become one, or four on as many hosts: files are fetched."""
    setup = with_folders(Kept(stage=3), tmp_path)
    whole = saved(setup, tmp_path)
    other = dataclasses.replace(setup, ranks=ranks, hosts=hosts_of)
    resumed = attempt(other, range(6), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {3}
    got = global_losses([losses for _, losses, *_ in resumed], ranks)
    wanted = global_losses([losses for _, losses, *_ in whole], 2)[3:]
    assert got == pytest.approx(wanted, rel=1e-5)
    again = attempt(other, range(7), tmp_path / "disk")
    assert {first for first, *_ in again} == {6}


def file_of(setup: Kept, host: str, rank: int, step: int) -> Path:
    """The file of ``rank`` in the generation of ``step`` on ``host``."""
    for path in setup.folder_of(host).glob(f"slot-*/rank-{rank:05d}-*.json"):
        if json.loads(path.read_text())["step"] == step:
            return path.with_suffix(".safetensors")
    raise LookupError(f"{host} has no file of rank {rank} at step {step}")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_record(path: Path) -> None:
    path.with_suffix(".json").unlink()


def tear_record(path: Path) -> None:
    record = path.with_suffix(".json")
    record.write_bytes(record.read_bytes()[:-9])


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


@pytest.mark.parametrize("hurt", [flip, lose_record, tear_record, cut])
def test_a_damaged_file_is_taken_from_its_copy(hurt: Any, tmp_path: Path, heard: list[str]) -> None:
    setup = with_folders(Kept(), tmp_path)
    whole = saved(setup, tmp_path)
    hurt(file_of(setup, "b", 1, 3))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {3}
    same(resumed, whole)
    if hurt is not lose_record:
        assert any("damaged" in line or "passed over" in line for line in heard)


def test_a_copy_that_is_damaged_is_found_where_it_arrives(tmp_path: Path, heard: list[str]) -> None:
    """Host b is lost, and of the two other copies of its file the one that it would be sent is
    damaged.
    """
    setup = with_folders(Kept(ranks=4, hosts="abcd", more={"copies": 3}), tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(3))
    shutil.rmtree(setup.folder_of("b"))
    flip(file_of(setup, "d", 1, 3))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {3}
    assert [line for line in heard if line.endswith("is damaged")] == [
        "the copy of rank-00001-of-00004.safetensors in memory of host d is damaged"
    ]
    same(resumed, whole)


@pytest.mark.parametrize("hurt", [flip, lose_record])
def test_an_older_generation_is_taken_where_no_copy_is_sound(
    hurt: Any, tmp_path: Path, heard: list[str]
) -> None:
    setup = with_folders(Kept(), tmp_path)
    whole = saved(setup, tmp_path)
    for host in "ab":
        hurt(file_of(setup, host, 1, 3))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {2}
    same(resumed, whole)
    assert any("generation of step 3 in memory is passed over" in line for line in heard)


def test_two_lost_hosts_leave_the_disk(tmp_path: Path) -> None:
    setup = with_folders(Kept(stage=2, ranks=4, hosts="abcd", more={"every": 2}), tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))

    def to_disk(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(str(tmp_path / "disk"))

    attempt(setup, range(3), before=to_disk)
    for host in "bc":  # the file of b and its copy
        shutil.rmtree(setup.folder_of(host))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {1}
    same(resumed, whole)


def test_hosts_that_have_nothing_are_named(tmp_path: Path, log: Any) -> None:
    """A job goes on with other hosts, from the disk; and without one, where it began before."""
    setup = with_folders(Kept(), tmp_path)
    before = dataclasses.replace(setup, base=tmp_path / "other")
    disk = str(tmp_path / "disk")
    attempt(before, range(2), before=lambda engine, rank: engine.save_checkpoint(disk))
    attempt(setup, range(1), tmp_path / "disk")
    nothing = f"the memory of 2 hosts (a, b) holds nothing of job job: {disk}/global_step0 is taken"
    assert nothing in log.text
    assert "not the loss of" not in log.text and "no launcher" not in log.text
    attempt(dataclasses.replace(setup, hosts="cc", more={"job": None}), range(0))
    assert "survive processes that end, not the loss of the host" in log.text
    assert "no launcher started this process" in log.text


def test_a_newer_checkpoint_on_disk_and_a_tag_prevail(tmp_path: Path) -> None:
    setup = with_folders(Kept(more={"every": 2}), tmp_path)

    def to_disk(engine: Any, rank: int) -> None:
        for step in range(3):
            train(engine, rank, range(step, step + 1))
            engine.save_checkpoint(str(tmp_path / "disk"))

    attempt(setup, range(3), before=to_disk)  # memory has step 2, the disk 1 to 3

    def tagged(engine: Any, rank: int) -> int:
        assert engine.global_steps == 3
        path, _ = engine.load_checkpoint(str(tmp_path / "disk"), "global_step1")
        assert path == str(tmp_path / "disk" / "global_step1")
        return int(engine.global_steps)

    resumed = attempt(setup, range(1), tmp_path / "disk", before=tagged)
    assert [said for *_, said in resumed] == [1, 1]


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_saved_after_a_load_of_an_earlier_step_prevails(step: int, tmp_path: Path) -> None:
    setup = with_folders(Kept(), tmp_path)

    def goes_back(engine: Any, rank: int) -> None:
        for number in range(3):
            train(engine, rank, range(number, number + 1))
            engine.save_checkpoint(str(tmp_path / "disk"))
        engine.memory.wait()
        before = engine.memory.newest_id
        engine.load_checkpoint(str(tmp_path / "disk"), f"global_step{step}")
        train(engine, rank, range(step, step + 1))
        engine.memory.wait()
        assert engine.memory.newest_id != before, "a step that comes again is saved again"

    attempt(setup, range(1), before=goes_back)
    resumed = attempt(setup, range(6), tmp_path / "nothing")
    assert {first for first, *_ in resumed} == {step + 1}


def test_a_generation_of_two_attempts_is_never_mixed(tmp_path: Path) -> None:
    """Rank 1's file of the first attempt stands beside rank 0's of the second, at one step."""
    setup = with_folders(Kept(more={"copies": 1}), tmp_path)
    attempt(setup, range(3))
    first = tmp_path / "first"
    shutil.copytree(setup.folder_of("b"), first)
    shutil.rmtree(setup.base)
    attempt(setup, range(3))
    shutil.rmtree(setup.folder_of("b"))
    shutil.copytree(first, setup.folder_of("a").parent.parent / "b" / "engine-0")
    with pytest.raises(RankFailed, match="no checkpoint in"):
        attempt(setup, range(6), tmp_path / "disk")


def test_a_copy_of_another_save_is_not_kept(tmp_path: Path, heard: list[str]) -> None:
    """Rank 1 has counted a save that rank 0 has not made: the generation before stays."""
    setup = with_folders(Kept(), tmp_path)

    def out_of_step(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(2))
        engine.memory.wait()
        engine.memory._saves += rank

    attempt(setup, range(5), before=out_of_step)
    assert {first for first, *_ in attempt(setup, range(5), tmp_path / "disk")} == {2}
    assert any("sent the copies of another save" in line for line in heard)


@pytest.mark.parametrize("returns", ["a", "b"])
def test_of_two_attempts_at_one_step_the_later_one_is_taken(returns: str, tmp_path: Path) -> None:
    """A host comes back with a whole generation, copies included, of an attempt before."""
    setup = with_folders(Kept(), tmp_path)
    attempt(setup, range(3))
    first = tmp_path / "first"
    shutil.copytree(setup.folder_of(returns), first)
    shutil.rmtree(setup.base)
    other = lambda engine, rank: engine.optimizer.param_groups[0].update(lr=0.5)  # noqa: E731
    later = attempt(setup, range(3), before=other)
    place = setup.folder_of(returns)
    shutil.rmtree(place)
    shutil.copytree(first, place)

    resumed = attempt(setup, range(3), tmp_path / "disk", lambda engine, rank: full_weights(engine))
    for (_, _, weights, _), (first_step, _, _, found) in zip(later, resumed):
        assert first_step == 3
        assert all(found[name].equal(weights[name]) for name in weights)


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "disk"])
def test_buffers_that_ranks_change_by_themselves_are_those_of_rank_0(
    in_memory: bool, tmp_path: Path
) -> None:
    """On disk as in memory."""
    settings = config(tmp_path / "run")
    if in_memory:
        memory_of = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
        settings["checkpoint"]["memory"] = memory_of

    def build() -> Any:
        model = net()
        model.register_buffer("seen", torch.zeros(2))
        return model

    def on_rank(rank: int, model: Any, resume: str | None) -> list[float]:
        threading.current_thread().host = "ab"[rank]  # type: ignore[attr-defined]
        engine, *_ = hf_zero.initialize(model=model, config=settings, resume=resume)
        if resume is None:
            engine.module.seen.fill_(rank + 1.0)
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
            if in_memory:
                engine.memory.wait()
            else:
                engine.save_checkpoint()
        assert engine.global_steps == 1
        return engine.module.seen.tolist()

    assert on_ranks(2, on_rank, None, build=build) == [[1.0, 1.0], [2.0, 2.0]]
    saving._claimed.clear()
    assert on_ranks(2, on_rank, "latest", build=build) == [[1.0, 1.0]] * 2


def test_what_a_route_keeps_beside_is_there_at_a_resume(tmp_path: Path) -> None:
    setup = with_folders(Kept(ranks=2, hosts="ab", more={"every": 3}), tmp_path)

    def keeps(engine: Any, rank: int) -> None:
        engine.memory.by_route = True
        train(engine, rank, range(3))
        assert engine.memory.is_due(3)
        files = {f"rng_state_{rank}.pth": b"%d" % rank, "trainer_state.json": b"of %d" % rank}
        memory.save(engine, files, {"epoch": 3, "seen": {4}} if rank == 0 else {})
        assert not engine.memory.is_due(3)

    attempt(setup, range(3), before=keeps)

    def finds(engine: Any, rank: int) -> Any:
        found = memory.newest(engine, None)
        folder = Path(found.directory)
        texts = {path.name: path.read_text() for path in folder.glob("*[hn]")}
        _, state = engine.load_checkpoint(found.directory, found.tag)
        return found.tag, texts, state["epoch"], engine.global_steps

    for *_, said in attempt(setup, range(3), before=finds):
        tag, texts, epoch, step = said
        assert (tag, epoch, step) == ("global_step3", 3, 3)
        assert texts["rng_state_0.pth"] == "0" and texts["rng_state_1.pth"] == "1"
        assert texts["trainer_state.json"] == "of 0"


def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    setup = with_folders(Kept(), tmp_path)
    attempt(setup, range(2), ends=True)
    assert not list(setup.base.iterdir())


def test_a_failing_job_keeps_its_generations(tmp_path: Path) -> None:
    setup = with_folders(Kept(), tmp_path)

    def fails(engine: Any, rank: int) -> None:
        train(engine, rank, range(2))
        try:
            raise RuntimeError("the loss is wrong")
        except RuntimeError:
            engine.destroy()
            raise

    with pytest.raises(RankFailed):
        attempt(setup, range(2), before=fails)
    assert {first for first, *_ in attempt(setup, range(3), tmp_path / "disk")} == {2}


def test_a_host_that_cannot_write_a_record_loses_one_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    """The save after it finds all ranks in step."""
    setup = with_folders(Kept(), tmp_path)
    write, failed = saving.write_record, []

    def full(path: Path, content: bytes) -> None:
        if "/b/" in str(path) and "slot-1" in str(path) and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(saving, "write_record", full)
    attempt(setup, range(3))
    assert {first for first, *_ in attempt(setup, range(4), tmp_path / "disk")} == {3}
    assert any("step 2 in memory failed on rank 1" in line for line in heard)
    assert any("step 2 in memory failed on rank 0 (a rank could not" in line for line in heard)


def no_hashes(setup: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of rank 1 fails at step 2, before it has told the others anything."""
    hashed = saving.MemoryCheckpoints._hashed

    def fails(self: Any, staged: Any) -> Any:
        if self.rank == 1 and staged.record.step == 2:
            raise TypeError("state that is no JSON")
        return hashed(self, staged)

    monkeypatch.setattr(saving.MemoryCheckpoints, "_hashed", fails)


def no_verdict(setup: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 learns that step 2 is whole, rank 1 loses its connections; and no later one is."""
    agree, calls = HostTransfers.agree, [0] * setup.ranks
    write = saving.write_record

    def cut(self: Any, ok: bool) -> bool:
        calls[self.rank] += 1
        found = agree(self, ok)
        if self.rank == 1 and calls[1] == 4:
            raise RuntimeError("Timed out")
        return found

    def writes(path: Path, content: bytes) -> None:
        if json.loads(content)["step"] > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(HostTransfers, "agree", cut)
    monkeypatch.setattr(saving, "write_record", writes)


@pytest.mark.parametrize(("fails", "last"), [(no_hashes, 3), (no_verdict, 2)])
def test_a_thread_that_fails_on_one_rank_leaves_a_whole_generation(
    fails: Any, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    setup = with_folders(Kept(more={"copies": 1}), tmp_path)
    with monkeypatch.context() as faults:
        fails(setup, faults)
        attempt(setup, range(3))
    assert {first for first, *_ in attempt(setup, range(4), tmp_path / "disk")} == {last}
    assert any("step 2 in memory failed on rank 1" in line for line in heard)


def test_what_follows_an_aborted_collective_is_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the host waits for collectives first where it waits for the copies. These end as
    well if the collectives are aborted, on all ranks.
    """
    setup = with_folders(Kept(), tmp_path)
    copied, engines = saving.copy_to_memory, dict[int, Any]()

    def copies(*args: Any) -> None:
        copied(*args)
        engine = engines.get(threading.get_ident())
        if engine is not None and engine.global_steps == 3:
            engine.mesh.watchdog.verdict = "rank 0 has waited 6 s, which is the timeout"

    def remember(engine: Any, rank: int) -> None:
        engines[threading.get_ident()] = engine

    with monkeypatch.context() as faults, pytest.raises(RankFailed, match="which is the timeout"):
        faults.setattr(saving, "copy_to_memory", copies)
        attempt(setup, range(4), before=remember)
    assert {first for first, *_ in attempt(setup, range(4), tmp_path / "disk")} == {2}


CLAIMS = """
import fcntl, sys
held = open(sys.argv[1], "w")
fcntl.lockf(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("saved", [False, True])
def test_two_living_jobs_of_one_name_are_refused(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the second one begins or, if neither has saved before, at its first save. When the other
    has ended, it goes on.
    """
    monkeypatch.setattr(folders, "PATIENCE", 0.0)
    setup = with_folders(Kept(), tmp_path)
    engine = folders.job_folder(setup.base, "job") / "b" / "engine-0"

    def lives(engine_: Any = None, rank: int = 0) -> None:
        if rank == 0:
            engine.mkdir(parents=True)
            launched = [sys.executable, "-c", CLAIMS, str(engine / folders.CLAIM)]
            others.append(subprocess.Popen(launched, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert others[0].stdout is not None and others[0].stdout.readline() == b"held\n"

    others: list[subprocess.Popen[bytes]] = []
    if saved:
        lives()
    with pytest.raises(RankFailed, match="rank 1: another job that is running saves into"):
        attempt(setup, range(0 if saved else 2), before=None if saved else lives)
    others[0].communicate()
    attempt(setup, range(2))
    assert {first for first, *_ in attempt(setup, range(3), tmp_path / "disk")} == {2}


@pytest.mark.parametrize("linked", [False, True])
def test_folders_of_other_users_are_neither_read_nor_written(
    linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = with_folders(Kept(), tmp_path)
    attempt(setup, range(2))
    (job,) = setup.base.iterdir()
    if linked:
        job.rename(tmp_path / "theirs")
        job.symlink_to(tmp_path / "theirs")
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        job.rename(folders.job_folder(setup.base, "job"))
    said = "is a link" if linked else "is of the user"
    with pytest.raises(RankFailed, match=said):
        attempt(setup, range(0))

    def looks(rank: int) -> None:
        threading.current_thread().host = setup.hosts[rank]  # type: ignore[attr-defined]
        newest_in_memory(ZeroConfig.from_dict(setup.config))

    with pytest.raises(RankFailed, match=said):
        run_ranks(2, looks)
    made = folders.job_folder(tmp_path / "deep" / "memory", "job")
    if linked:
        folders.make_own(made)
        assert made.stat().st_mode & 0o777 == 0o700


def test_machines_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(job_folders, "machine", lambda base: str(next(numbers)))
    with pytest.raises(RankFailed, match=r"containers call themselves a; .* HF_ZERO_HOST"):
        attempt(with_folders(Kept(hosts="aa"), tmp_path), range(0))


class Script(Kept):
    """A script written for DeepSpeed."""

    def open(self, model: Any) -> Any:
        return deepspeed.initialize(
            model=model, optimizer=self.optimizer(model), config=self.config
        )[0]


def test_a_script_of_deepspeed_resumes_without_a_disk(tmp_path: Path) -> None:
    """Its load returns nothing where a folder has no checkpoint."""
    setup = Script(stage=2, base=tmp_path / "memory")
    whole = attempt(Script(stage=2, base=tmp_path / "other"), range(4), tmp_path / "disk")
    attempt(setup, range(2), tmp_path / "disk")
    resumed = attempt(setup, range(4), tmp_path / "disk")
    assert {first for first, *_ in resumed} == {2}
    same(resumed, whole)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"limit": "100kB"}, r"limit is 100.00 kB; raise the limit, lower .*copies \(2\), or"),
        ({"copies": 1, "limit": 200_000}, "take .* and checkpoint.memory.limit .* limit, or take"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    setup = with_folders(Kept(more=more), tmp_path)
    with pytest.raises(RankFailed, match=said):
        attempt(setup, range(0))


@pytest.mark.parametrize("trains", [False, True])
def test_a_full_file_system_is_refused(
    trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, and at the first save where others have filled it meanwhile."""

    def fills(engine: Any = None, rank: int = 0) -> None:
        monkeypatch.setattr(folders, "room", lambda base, folder: 1000)

    if not trains:
        fills()
    setup = with_folders(Kept(), tmp_path)
    with pytest.raises(RankFailed, match=r"has room for 1\.00 kB; name a folder with more room"):
        attempt(setup, range(2) if trains else range(0), before=fills)


def test_files_on_a_disk_take_the_place_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    """The first of two bases has no room: generations are in the second, and found there."""
    small, disk = tmp_path / "small", tmp_path / "big"
    small.mkdir(), disk.mkdir()
    monkeypatch.setattr(folders, "bases", lambda asked: [small, disk])
    free = folders.room
    monkeypatch.setattr(folders, "room", lambda at, to: 1 if at == small else free(at, to))
    setup = with_folders(Kept(), tmp_path)
    attempt(setup, range(3))
    assert {first for first, *_ in attempt(setup, range(4), tmp_path / "disk")} == {3}
    assert any("a disk: there is no room in memory" in line for line in heard)


def test_saves_are_off_without_the_key(tmp_path: Path) -> None:
    setup = with_folders(Kept(ranks=1, hosts="a", more={"every": None}), tmp_path)

    def refused(engine: Any, rank: int) -> None:
        assert engine.memory is None
        with pytest.raises(CheckpointError, match=r"write checkpoint\.memory\.every"):
            memory.save(engine)
        assert memory.newest(engine, tmp_path / "disk") is None

    def on_rank(rank: int) -> None:
        engine = setup.open(models[rank])
        refused(engine, rank)
        engine.destroy()

    models = setup.models()
    run_ranks(1, on_rank)


def test_verify_reads_what_a_host_holds(tmp_path: Path) -> None:
    """Files of other hosts are no damage; a file that differs from its record is."""
    setup = with_folders(Kept(ranks=4, hosts="abcd"), tmp_path)
    attempt(setup, range(3))
    (job,) = setup.base.iterdir()
    found = verify_all(job)
    assert len(found) == 8 and all(verdict.whole and verdict.files == 2 for verdict in found)
    hurt = file_of(setup, "b", 1, 3)
    flip(hurt)
    damaged = [verdict for verdict in verify_all(job) if not verdict.whole]
    assert [verdict.folder for verdict in damaged] == [hurt.parent]
    assert damaged[0].problems[0].startswith(f"{hurt} is damaged: its hash is")
    whole = with_folders(Kept(), tmp_path / "two")
    attempt(whole, range(2))
    verdict = verify_checkpoint(whole.folder_of("a"))
    assert verdict.whole and verdict.parameters > 0
    attempt(whole, range(2), tmp_path / "none")  # reads, and saves nothing
    resumed = whole.folder_of("a") / "resume"
    for file in resumed.glob("*/rank-*"):
        file.unlink()
    found = verify_all(whole.base)
    assert {verdict.folder.name for verdict in found} == {"slot-0", "slot-1"}
    assert not verify_all(resumed)[0].whole, "where it is asked for"


@pytest.mark.parametrize(
    ("stage", "ranks", "keys"),
    [(0, 2, {}), (1, 4, {"replicate_size": 2}), (2, 2, {}), (3, 4, {"replicate_size": 2})],
)
def test_what_generations_take_is_foreseen(
    stage: int,
    ranks: int,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes counted before training are those of the files, up to headers and generators: of
    each host by its ranks, of all of them in the plan that ranks share.
    """
    needs = importlib.import_module("hf_zero.planning.needs")  # the package has a function so named
    monkeypatch.setattr(needs, "is_in_memory", lambda folder: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    shares: list[int] = []
    taken: list[tuple[int, int]] = []  # by rank: bytes on its host, before training and at a save
    count, take = needs.memory_checkpoints, saving.MemoryCheckpoints._take_room
    monkeypatch.setattr(
        needs, "memory_checkpoints", lambda plan: shares.append(count(plan)) or shares[-1]
    )

    def takes(self: Any, sizes: list[int]) -> int:
        taken.append((self.rank, take(self, sizes)))
        return taken[-1][1]

    monkeypatch.setattr(saving.MemoryCheckpoints, "_take_room", takes)
    setup = with_folders(Meshed(stage=stage, ranks=ranks, hosts="abcd", keys=keys), tmp_path)
    attempt(setup, range(2))
    headers = 2 * 2 * 32_000
    for rank in range(ranks):
        planned, saved = (nbytes for each, nbytes in taken if each == rank)
        assert planned <= saved <= planned + headers
    held = sum(path.stat().st_size for path in setup.base.rglob("*.safetensors"))
    assert len({*shares}) == 1 and ranks * shares[0] <= held <= ranks * (shares[0] + headers)


class WholeBatches(Rows):
    """As many rows as five steps of eight samples have: no batch of an epoch is filled up."""

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize(("after", "hosts_of"), [(1, "a"), (2, "ab"), (4, "abab")])
@pytest.mark.parametrize("on_disk", [None, 1, 3])
def test_initialize_resumes_from_the_newer_of_memory_and_disk(
    tmp_path: Path, heard: list[str], on_disk: int | None, after: int, hosts_of: str
) -> None:
    """Memory has step 2. Steps of 8 samples, in micro-batches of 2, stay on any number of ranks."""
    settings = config(tmp_path / "run")
    del settings["train_batch_size"]
    settings["gradient_accumulation_steps"] = 2

    def attempt(world: int, name: str, **how: Any) -> list[Any]:
        memory = {"every": 2, "folder": str(tmp_path / name), "job": "job"}
        of_run = settings | {"checkpoint": {"folder": str(tmp_path / "run"), "memory": memory}}
        saving._claimed.clear()

        def on_rank(rank: int, model: Any) -> Any:
            threading.current_thread().host = hosts_of[rank % len(hosts_of)]  # type: ignore
            steps, engine = resuming(rank, model, of_run, WholeBatches(), **how)
            engine.memory.wait()
            return steps, engine

        return on_ranks(world, on_rank, build=net)

    def samples(ranks: list[Any]) -> dict[int, list[int]]:
        first = ranks[0][0]
        return {step: sorted(chain(*(steps[step][1] for steps, _ in ranks))) for step in first}

    whole = attempt(2, "other")
    attempt(2, "memory", saves={on_disk}, stop=2 if on_disk != 3 else 3)
    resumed = attempt(after, "memory", resume="latest")
    assert {min(steps) for steps, _ in resumed} == {4 if on_disk == 3 else 3}
    for _, engine in resumed:
        assert (str(tmp_path / "memory") in engine.resumed_from) == (on_disk != 3)
        assert engine.train_batch_size() == 8
    assert samples(resumed) == {step: samples(whole)[step] for step in samples(resumed)}
    if after == 2:
        for (steps, _), (all_steps, _) in zip(resumed, whole):
            assert steps == {step: all_steps[step] for step in steps}


def test_a_checkpoint_that_is_named_is_the_one_that_is_resumed(
    tmp_path: Path, heard: list[str]
) -> None:
    settings = config(tmp_path / "run")
    memory = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
    settings["checkpoint"]["memory"] = memory
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    resuming(0, net(), settings, Rows(), {1}, 2)[1].memory.wait()
    named = tmp_path / "run" / "global_step1"
    for resume, step in ((named, 1), (tmp_path / "run", 2), ("latest", 2)):
        saving._claimed.clear()
        engine, *_ = hf_zero.initialize(
            model=net(), config=settings, training_data=Rows(), resume=resume
        )
        assert engine.global_steps == step
    shutil.rmtree(tmp_path / "memory")
    saving._claimed.clear()
    settings["checkpoint"].pop("folder")
    engine, *_ = hf_zero.initialize(model=net(), config=settings, resume="latest")
    assert engine.resumed_from is None and engine.global_steps == 0


def test_a_resume_hashes_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice before there is an engine, the load and the reads share one comparison."""
    memory_of = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
    settings = config(tmp_path / "run") | {"checkpoint": {"memory": memory_of}}
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    resuming(0, net(), settings, Rows(), stop=1)[1].memory.wait()
    saving._claimed.clear()
    hashed, blocks = [], []
    hash_of_file, compare = resume_of.hash_of_file, TensorFile._compare

    def counted(path: Path, *how: Any) -> str:
        hashed.append(path)
        return hash_of_file(path, *how)

    monkeypatch.setattr(resume_of, "hash_of_file", counted)
    monkeypatch.setattr(TensorFile, "_compare", lambda *each: blocks.append(each) or compare(*each))
    engine, *_ = hf_zero.initialize(model=net(), config=settings, resume="latest")
    assert engine.global_steps == 1
    assert len(hashed) == 1 and not blocks
    engine.load_checkpoint(str(tmp_path / "run"), verify=True)
    assert blocks, "what the caller asks for is done"


def test_the_figures_of_a_run_stay_in_its_folder(tmp_path: Path) -> None:
    """Nothing is saved on disk: the folder is the one that the script resumes."""
    memory_of = {"every": 2, "folder": str(tmp_path / "memory"), "job": "job"}
    settings = config(tmp_path / "run") | {"checkpoint": {"memory": memory_of}}
    settings["metrics"] = {"enabled": True}
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    for stop, first in ((3, 0), (5, 2)):
        saving._claimed.clear()
        steps, engine = resuming(
            0, net(), settings, Rows(), stop=stop, resume=str(tmp_path / "run")
        )
        assert min(steps) == first + 1
        engine.memory.wait()
        engine.measures.finish(engine)
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == [*range(1, stop + 1)]
        del engine
    assert not list((tmp_path / "memory").rglob("metrics.jsonl"))


def test_a_generation_that_is_lost_between_choice_and_load_is_named(tmp_path: Path) -> None:
    memory_of = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}
    settings = config(tmp_path / "run") | {"checkpoint": {"memory": memory_of}}
    threading.current_thread().host = "a"  # type: ignore[attr-defined]
    resuming(0, net(), settings, Rows(), stop=1)[1].memory.wait()
    saving._claimed.clear()
    found = newest_in_memory(ZeroConfig.from_dict(settings))
    assert found is not None and found.step == 1
    flip(next((tmp_path / "memory").rglob("slot-*/rank-*.safetensors")))
    engine, *_ = hf_zero.initialize(model=net(), config=settings)
    with pytest.raises(CheckpointError, match="cannot be loaded; start the job again"):
        engine.load_checkpoint(found.directory, found.tag)


def test_an_attempt_that_does_not_resume_is_told_what_it_overwrites(
    tmp_path: Path, heard: list[str]
) -> None:
    setup = with_folders(Kept(ranks=1, hosts="a"), tmp_path)
    attempt(setup, range(3))
    attempt(setup, range(4), tmp_path / "disk")
    assert not any("has not resumed" in line for line in heard)
    attempt(setup, range(1))
    assert any("has left step 4 in memory" in line for line in heard)


def test_a_save_on_disk_of_the_same_step_is_the_later_one(tmp_path: Path) -> None:
    """It has what the script has written since, and a load of an engine that has made steps means
    the folder that it names. A generation keeps the client state of the save before it.
    """
    setup, disk = with_folders(Kept(), tmp_path), str(tmp_path / "disk")

    def saving_at_3(engine: Any, rank: int) -> None:
        setup.train(engine, rank, range(3))
        engine.memory.wait()
        engine.save_checkpoint(disk, client_state={"best": 1})

    attempt(setup, range(5), before=saving_at_3)

    def going_back(engine: Any, rank: int) -> tuple[int, Any, Any, str]:
        first, state = engine.global_steps, dict(engine.memory.client_state)
        setup.train(engine, rank, range(first, first + 2))
        path, client = engine.load_checkpoint(disk)
        return first, state, client, str(path)

    told = [each[3] for each in attempt(setup, range(0), disk, going_back)]
    for first, state, client, path in told:
        assert (first, state, client) == (5, {"best": 1}, {"best": 1})
        assert path.startswith(disk)
    shutil.rmtree(setup.base)
    tie = attempt(setup, range(3), before=saving_at_3)
    assert [each[0] for each in tie] == [3, 3]
    again = attempt(setup, range(3), disk, lambda engine, rank: dict(engine.memory.client_state))
    assert [(each[0], each[3]) for each in again] == [(3, {"best": 1})] * 2
