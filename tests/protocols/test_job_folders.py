"""Folders of jobs in memory: one job ends as the next one of its name begins, and `hf-zero clean`
removes what ended jobs have left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint.memory import folders, saving
from hf_zero.checkpoint.storage import collective_try
from hf_zero.errors import CheckpointError
from tests.protocols import memory
from tests.protocols.explore import Judge, explore
from tests.protocols.files import folder_of
from tests.protocols.ranks import CollectiveFailed, World
from tests.protocols.simulation import Process, Simulation
from tests.protocols.stand_ins import Times

TIMEOUT, PATIENCE = 20.0, 0.5  # of a wait for a claim: fewer looks than in 10 s
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
        collective_try(made._ranks, made._make_folder)
        made.mark()
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
        patch.setattr(folders, "PATIENCE", PATIENCE)
        yield


@pytest.mark.parametrize("settings, few", [(SETTINGS, 40), (HELD, 120)], ids=["anywhere", "held"])
@pytest.mark.parametrize("jobs", JOBS)
def test_a_job_keeps_its_folder(
    jobs: str, settings: Any, few: int, schedules: Callable[..., int]
) -> None:
    explore(JOBS[jobs], schedules(few, 2 * len(JOBS)), **settings)
