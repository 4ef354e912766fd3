"""Protocols of jobs over files: folders of jobs in memory, which the next job of a name or
`hf-zero clean` may take; one writer of a folder; logs of saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import save_log
from hf_zero.checkpoint.convert.targets import LOCK, lock_folder
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.memory import folders, saving
from hf_zero.checkpoint.save_log import SaveLog
from hf_zero.deepspeed import state_dicts
from hf_zero.errors import CheckpointError
from tests.protocols import memory
from tests.protocols.explore import Judge, explore
from tests.protocols.files import PerProcess, folder_of
from tests.protocols.ranks import CollectiveFailed, World
from tests.protocols.simulation import Process, Simulation, running
from tests.protocols.stand_ins import Times

TIMEOUT, PATIENCE = 20.0, 0.5  # of a wait for a claim: fewer polls than in 10 s
SETTINGS = {"delays": (0.1, 0.8), "deaths": 1, "seconds": 200.0}
# a process that is held up as it removes a folder
HELD = {"delays": (0.1, 0.8), "seconds": 200.0, "at": ("rename", "unlink")}
RANKS = 2


class Jobs:
    """Jobs of one name on one host, which begin at any time, and processes that clean it."""

    def __init__(self, jobs: int, cleaners: int) -> None:
        self.jobs, self.cleaners = jobs, cleaners

    def __call__(self, simulation: Simulation) -> Judge:
        base, faults = folder_of(simulation), list[str]()
        top = folders.job_folder(base, memory.JOB)
        left = top / "host" / "engine-0" / "slot-0" / "of an attempt before"
        left.parent.mkdir(parents=True)
        left.touch()

        def run(number: int, world: World, rank: int) -> None:
            made = memory.Rank(world, rank, base, ["host"] * RANKS)
            ends_well = False
            try:
                self.train(made, number, faults, left)
                ends_well = True
            finally:
                made.close(failing=not ends_well)
                simulation.exit(world.processes[rank])

        def clean() -> None:
            for job in folders.jobs_in(base):
                folders.remove_job(job.folder)

        for number in range(self.cleaners):
            process = Process(-1 - number)
            simulation.spawn(f"cleaner {number}", clean, process)
        for number in range(self.jobs):
            World(simulation, RANKS, partial(run, number), TIMEOUT, name=f"job {number} rank")

        def judge(end: str) -> str:
            errors = simulation.errors
            wrong = simulation.wrong(end, faults, CheckpointError, CollectiveFailed)
            if wrong:
                return wrong
            if not simulation.untroubled(PATIENCE / 2):
                return ""
            if errors:
                return f"an error though nothing has happened: {errors}"
            return f"folders are left: {os.listdir(base)}" if os.listdir(base) else ""

        return judge

    def train(
        self, made: saving.MemoryCheckpoints, number: int, faults: list[str], left: Path
    ) -> None:
        """Mark the folders that are there, make and mark them before a save, save and end."""
        made.mark()
        found = left.exists()
        collective_try(made._ranks, made.make_folder)
        made.mark()
        made.own()
        own = made.folder(made.base) / "slot-0" / f"{number}-{made.rank}"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.touch()
        Times().sleep(0.2)  # a step
        made._ranks.all_gather_object("another step")
        if found and not left.exists():
            faults.append(f"the generation that job {number} has found is removed")
        if not own.exists():
            faults.append(f"what job {number} has saved is removed")
        if not all(mark.is_current() for mark in made._marks.values()):
            faults.append(f"a mark of job {number} is not that of its folder")
        if made.acts_for_host and not made._holds(made.folder(made.base)):
            faults.append(f"nobody has claimed the folder of job {number}")
        made._ranks.all_gather_object("the end")


JOBS = {
    "the next one begins": Jobs(2, 0),
    "it is cleaned": Jobs(1, 2),
    "the next one begins as it is cleaned": Jobs(2, 1),
}


@pytest.fixture(autouse=True)
def processes() -> Iterator[None]:
    with memory.processes() as patch:
        patch.setattr(folders, "CLAIM_SECONDS", PATIENCE)
        patch.setattr(save_log, "_folder", lambda: _folders._value())
        patch.setattr(save_log, "_job", job)
        patch.setattr(save_log, "_is_related", lambda writer: writer.job == job())
        yield


@pytest.mark.parametrize("settings, few", [(SETTINGS, 40), (HELD, 120)], ids=["anywhere", "held"])
@pytest.mark.parametrize("jobs", JOBS)
def test_a_job_keeps_its_folder(
    jobs: str, settings: Any, few: int, schedules: Callable[..., int]
) -> None:
    explore(JOBS[jobs], schedules(few, 2 * len(JOBS)), **settings)


OF_WRITERS = {"delays": (0.3,), "deaths": 1, "seconds": 100.0}
Entry = Callable[[Path], AbstractContextManager[object]]


@contextmanager
def converting(folder: Path) -> Iterator[bool]:
    with lock_folder(folder):
        yield True


ENTRIES: dict[str, tuple[Entry, str]] = {
    "one writes for all": (lambda folder: state_dicts._one_writer(folder), ".fp32.lock"),
    "others are refused": (converting, LOCK),
}


def writers(enter: Entry, lock: str, size: int, simulation: Simulation) -> Judge:
    """Processes that come one after the other or at once, and write a file in two parts."""
    folder, writing, faults = folder_of(simulation), list[Process](), list[str]()
    written: list[Process] = []

    def come(process: Process) -> None:
        with enter(folder) as writes:
            if writes:
                if any(each.alive for each in writing):
                    faults.append("two write at once")
                writing.append(process)
                for part in ("half", "whole"):
                    (folder / "model").write_text(part)
                writing.remove(process)
                written.append(process)
            elif not written:
                faults.append("one goes on without the files")

    for number in range(size):
        process = Process(number)
        simulation.spawn(f"process {number}", partial(come, process), process)

    def judge(end: str) -> str:
        wrong = simulation.wrong(end, faults, CheckpointError)
        if wrong:
            return wrong
        left = (folder / lock).exists() and not simulation.killed
        return "the lock is left" if left else ""

    return judge


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_writes(entry: str, schedules: Callable[..., int]) -> None:
    explore(partial(writers, *ENTRIES[entry], 3), schedules(400, len(ENTRIES)), **OF_WRITERS)


OF_LOGS = {"delays": (0.1,), "deaths": 1, "seconds": 100.0}
# a process that is held up before it locks or removes a log
LOG_HELD = {"delays": (0.1, 0.3), "seconds": 100.0, "at": ("lock", "unlink")}
_folders = PerProcess("folder", Path)  # of the logs of a simulation


def log_jobs(writers: int, readers: int, simulation: Simulation) -> Judge:
    """Jobs that save and end, and others that look for their saves."""
    folder, faults, noted = folder_of(simulation), list[str](), dict[Process, str]()

    def write(process: Process) -> None:
        process.variables["folder"] = folder
        log = SaveLog()
        for number in range(2):
            log.note((f"save {number} of {process.rank}", "a place"))
            noted[process] = f"save {number} of {process.rank}"
        del noted[process]
        log.close()

    def read(process: Process) -> None:
        process.variables["folder"] = folder
        for _ in range(2):
            before = {writer: save for writer, save in noted.items() if writer.alive}
            found = SaveLog().others()
            for writer, save in before.items():
                if writer.alive and writer in noted and (save, "a place") not in found:
                    faults.append(f"{save} is not seen")

    for number in range(writers + readers):
        process = Process(number)
        call = partial(write if number < writers else read, process)
        simulation.spawn(f"job {number}", call, process)

    def judge(end: str) -> str:
        errors = [task.error for task in simulation.ended if task.error is not None]
        return end or "; ".join(faults) or (f"an error: {errors}" if errors else "")

    return judge


def job() -> str:
    simulation = running()
    assert simulation is not None and simulation.current is not None
    return f"job {simulation.current.process.rank}"


@pytest.mark.parametrize(
    "size, few, settings", [(2, 100, OF_LOGS), (1, 500, LOG_HELD)], ids=["anywhere", "held"]
)
def test_saves_of_running_jobs_are_seen(
    size: int, few: int, settings: Any, schedules: Callable[..., int]
) -> None:
    explore(partial(log_jobs, size, size), schedules(few, 2), **settings)
