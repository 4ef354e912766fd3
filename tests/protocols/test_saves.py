"""Saves in the background into a folder: what `latest` names is whole and never older than a save
that has succeeded, wherever processes end; the agent starts all ranks again. While all live, a save
succeeds on all ranks or on none, however long disks take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import background_saves, commit, retention, save_job, storage
from hf_zero.checkpoint import find as finding
from hf_zero.checkpoint.background_saves import BackgroundSaver
from hf_zero.checkpoint.commit import FolderTarget
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.save_job import SaveJob, SharedFiles
from hf_zero.checkpoint.tensorfile import BlockHashes, FileHashes
from hf_zero.distributed.store import StoreMessages
from hf_zero.errors import CheckpointError
from tests.protocols.explore import Judge, explore, find, seed_fault
from tests.protocols.files import PerProcess, folder_of, scheduled
from tests.protocols.ranks import CollectiveFailed, World, run_attempts
from tests.protocols.simulation import Simulation, running

TIMEOUT, ATTEMPTS, SAVES = 30.0, 2, 2
SETTINGS = {"delays": (0.3, 45.0), "deaths": 2, "seconds": 1500.0}


@dataclass(frozen=True)
class File:
    """A file of a manifest."""

    name: str
    size: int = 8
    hash: str = ""
    blocks: Any = None


@dataclass(frozen=True)
class Manifest:
    """In place of the manifest of a model: the files of a save, and their order."""

    save_id: str
    files: tuple[File, ...]
    order: int = 0

    def all_files(self) -> tuple[File, ...]:
        return self.files

    def dumps(self) -> bytes:
        files = [file.name for file in self.files]
        counters = {"global_steps": int(self.save_id[:8])}
        said = {"save_id": self.save_id, "files": files, "order": self.order, "counters": counters}
        return json.dumps(said).encode()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        try:
            said = json.loads(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged") from error
        return cls(said["save_id"], tuple(map(File, said["files"])), said["order"])


def damage(folder: Path) -> str:
    """Return what is missing in a checkpoint, or ""."""
    try:
        manifest = Manifest.read(folder / MANIFEST_NAME)
        contents = {file.name: (folder / file.name).read_bytes() for file in manifest.files}
    except (OSError, CheckpointError) as error:
        return str(error)
    own = manifest.save_id[:8].encode()
    return "; ".join(f"{name} is of another save" for name in contents if contents[name] != own)


def write_image(path: Path, parts: Iterator[memoryview], plan: Any) -> FileHashes:
    hold_up("write")
    storage.write_file(path, b"".join(parts))
    return FileHashes("hash", BlockHashes(1, ""))


def retain(*args: Any) -> list[Any]:
    hold_up("removal")
    return retention.retain(*args)


def hold_up(what: str) -> None:
    """Sleep as long as ``what`` takes on the disk of the process that runs."""
    simulation = running()
    assert simulation is not None and simulation.current is not None
    simulation.sleep(simulation.current.process.variables.get(what, 0.0))


class Job:
    """A job of ``size`` ranks that saves under one tag again and again, or under new ones, of which
    it keeps some. write: seconds that the disks of ranks take for a file. removal: seconds that
    rank 0's takes to remove old checkpoints.
    """

    def __init__(
        self,
        size: int,
        same_tag: bool,
        keep: int | None,
        write: Sequence[float] = (),
        removal: float = 0.0,
    ) -> None:
        self.size, self.same_tag, self.keep = size, same_tag, keep
        self.write, self.removal = write or [0.0] * size, removal

    def __call__(self, simulation: Simulation) -> Judge:
        folder, faults = folder_of(simulation), list[str]()
        succeeded, newest = [0], [0]  # numbers of saves, and of what `latest` has named
        self.outcomes: dict[int, set[bool]] = {}  # of each save, on the ranks that have waited

        def start(attempt: int) -> World:
            train = partial(self.train, folder, 1 + attempt * SAVES, succeeded)
            return World(simulation, self.size, train, TIMEOUT, name=f"{attempt} rank")

        def ended() -> None:
            faults.append(self.wrong(folder, max(succeeded), newest))

        run_attempts(simulation, ATTEMPTS, start, ended)

        def judge(end: str) -> str:
            errors = simulation.errors
            wrong = simulation.wrong(end, faults, CheckpointError, CollectiveFailed)
            if wrong:
                return wrong
            if not simulation.killed and any(len(each) > 1 for each in self.outcomes.values()):
                return f"a save has failed on some ranks alone: {errors}"
            if simulation.untroubled(TIMEOUT / 2) and (errors or newest[0] < ATTEMPTS * SAVES):
                return f"save {newest[0]} is the latest though nothing has happened: {errors}"
            return ""

        return judge

    def train(
        self, folder: Path, first: int, succeeded: list[int], world: World, rank: int
    ) -> None:
        def gone(ranks: Sequence[int]) -> dict[int, str]:
            return {each: "it died" for each in ranks if not world.processes[each].alive}

        def all_live() -> bool:
            return not gone(range(self.size))

        def messages(name: str) -> StoreMessages:
            return StoreMessages(world.store(name), rank, TIMEOUT, gone, all_live)

        mesh = SimpleNamespace(
            store_messages=messages,
            rank=rank,
            pp_stage_ranks=self.size,
            device=torch.device("cpu"),
            timeout=math.inf,
        )
        config = SimpleNamespace(keep_staging=False, staging_bytes=None)
        world.processes[rank].variables |= {"write": self.write[rank], "removal": self.removal}
        try:
            saver = BackgroundSaver(mesh, config)
        except RuntimeError as error:  # the store does not answer, and no engine is made
            world.simulation.exit(world.processes[rank])
            raise CollectiveFailed(str(error)) from error
        try:
            for number in range(first, first + SAVES):
                self.save(saver, folder, number, world, rank)
                world.collective("training", rank, f"after save {number}")
            self.wait(saver, number)
            if rank == 0:
                succeeded.append(number)
        finally:
            thread = saver._thread
            if thread is not None and world.processes[rank].alive:
                thread.join()  # as at the end of an interpreter
            world.simulation.exit(world.processes[rank])

    def save(
        self, saver: BackgroundSaver, folder: Path, number: int, world: World, rank: int
    ) -> None:
        """Begin a save as ``save_checkpoint`` does, without an engine."""
        if saver.number:  # a save of this attempt may be under way
            self.wait(saver, number - 1)
        tag, save_id = "tag" if self.same_tag else f"step-{number}", f"{number:08d}" + "f" * 24
        target = FolderTarget(folder, tag, save_id)
        if rank == 0:
            target.prepare()
        world.collective("begun", rank, f"save {number}")
        names = [finding.rank_file(each, self.size) for each in range(self.size)]
        manifest: Any = Manifest(save_id, tuple(map(File, names)))
        shared = SharedFiles(manifest, {}, {finding.LATEST: tag.encode()}) if rank == 0 else None
        job = SaveJob(target, target.path_of(names[rank]), rank, self.size, shared, self.keep)
        content = torch.frombuffer(bytearray(save_id[:8].encode()), dtype=torch.uint8)
        plan: Any = SimpleNamespace(size=content.numel())
        saver.copy_to_host(plan, {}, content)
        saver.start(job, plan)

    def wait(self, saver: BackgroundSaver, number: int) -> None:
        """Wait for save ``number`` and note its outcome."""
        outcomes = self.outcomes.setdefault(number, set())
        try:
            saver.wait()
        except CheckpointError:
            outcomes.add(False)
            raise
        outcomes.add(True)

    def wrong(self, folder: Path, least: int, newest: list[int]) -> str:
        """Return what a restart would find that is wrong, with the save ``least`` or a later one;
        note which it finds.
        """
        if not (folder / finding.LATEST).exists():
            return "`latest` is gone" if newest[0] or least else ""
        try:
            latest = finding.locate(folder)
        except CheckpointError as error:
            return f"`latest` names nothing: {error}"
        damaged = damage(latest)
        if damaged:
            return f"`latest` names a damaged checkpoint: {damaged}"
        before, newest[0] = newest[0], int(Manifest.read(latest / MANIFEST_NAME).save_id[:8])
        if newest[0] < max(least, before):
            return f"`latest` names save {newest[0]}, and {max(least, before)} has succeeded"
        return ""


JOBS = {
    "one tag": Job(2, True, None),
    "the newest is kept": Job(2, False, 1),
    "three ranks": Job(3, False, None),
    # each rank waits for the next one, for less than the timeout
    "slow disks": Job(3, False, None, write=[20.0, 0.0, 40.0]),
    "a slow removal": Job(2, False, 1, removal=40.0),
}


@pytest.fixture(autouse=True)
def processes() -> Iterator[None]:
    exchange = storage.exchange

    def exchanged(first: Path, second: Path) -> bool:
        simulation = running()
        assert simulation is not None
        simulation.point("exchange")
        return exchange(first, second)

    with scheduled() as patch:
        patch.setattr(storage, "exchange", exchanged)
        patch.setattr(background_saves, "_in_flight", PerProcess("_in_flight", dict))
        patch.setattr(background_saves, "write_image", write_image)
        patch.setattr(save_job, "retain", retain)
        for module in (commit, save_job):
            patch.setattr(module, "read_manifest", Manifest.read)
        patch.setattr(finding, "integrity_error", damage)
        yield


@pytest.mark.parametrize("job", JOBS)
def test_latest_is_whole(job: str, schedules: Callable[..., int]) -> None:
    explore(JOBS[job], schedules(30, len(JOBS)), **SETTINGS)


def test_latest_is_written_before_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    early = (
        "storage.fsync_path(self._temporary)",
        "os.replace(self.path_of(NEW + 'latest'), self.directory / 'latest')\n"
        "    storage.write_file(self.path_of(NEW + 'latest'), above['latest'])\n"
        "    storage.fsync_path(self._temporary)",
    )
    seed_fault(monkeypatch, FolderTarget, "publish", early)
    held = {"deaths": 2, "seconds": 1500.0, "at": "rename"}
    fault = find(JOBS["three ranks"], 1000, **held)
    assert "names nothing" in fault.text


def test_the_wait_for_the_result_ends_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(monkeypatch, StoreMessages, "_await", (" and not patient()", ""))
    assert "on some ranks alone" in find(JOBS["slow disks"], 1, **SETTINGS).text
