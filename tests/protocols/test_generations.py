"""Generations in memory: a save that was committed survives the end of any process, and with copies
the loss of any host; the agent starts all ranks again when one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint.memory import inventory
from hf_zero.checkpoint.memory.folders import job_folder
from hf_zero.checkpoint.memory.record import RankRecord, record_path
from hf_zero.checkpoint.tensorfile import hash_of
from hf_zero.errors import CheckpointError
from tests.protocols import memory
from tests.protocols.explore import Judge, explore
from tests.protocols.files import folder_of
from tests.protocols.ranks import CollectiveFailed, World, run_attempts
from tests.protocols.simulation import Simulation

TIMEOUT, ATTEMPTS, SAVES = 50.0, 2, 3
SETTINGS = {"delays": (0.3,), "deaths": 2, "seconds": 900.0}
# processes that die in a commit, and as they write records
COMMITTING = {"deaths": 2, "seconds": 900.0, "at": ("replace", "send")}


class Job:
    """A job of ranks on ``hosts``. An agent starts it again from the newest generation that is
    whole.
    """

    def __init__(self, hosts: Sequence[str], copies: int) -> None:
        self.hosts, self.copies = hosts, copies

    def __call__(self, simulation: Simulation) -> Judge:
        base, faults, committed = folder_of(simulation), list[str](), [0]

        def train(attempt: int, mail: dict, closed: set[int], world: World, rank: int) -> None:
            connections = memory.Connections(world, rank, mail, closed)
            made = memory.Rank(
                world, rank, base, self.hosts, connections, self.copies, attempt, committed.append
            )
            made.mark()
            found, _ = made.exchange_inventories()
            newest = next((each for each in found if each.is_complete()), None)
            if newest is not None:
                made.protect(newest.save_id)
                made.loaded(newest.attempt, newest.step, goes_back=False)
            start, whole = 0 if newest is None else newest.step, False
            try:
                for step in range(start + 1, start + 1 + SAVES):
                    world.collective("training", rank, f"step {step}")
                    made.save(memory.engine_at(step))
                made.wait()
                whole = True
            finally:
                made.close(failing=not whole, remove=False)
                simulation.exit(world.processes[rank])

        def start(attempt: int) -> World:
            call = partial(train, attempt, {}, set())
            return World(simulation, len(self.hosts), call, TIMEOUT, name=f"{attempt} rank")

        def ended() -> None:
            faults.append(self.wrong(base, max(committed)))

        run_attempts(simulation, ATTEMPTS, start, ended)

        def judge(end: str) -> str:
            wrong = simulation.wrong(end, faults, CheckpointError, CollectiveFailed)
            if wrong:
                return wrong
            untroubled = simulation.untroubled(TIMEOUT / 2)
            if untroubled and max(committed) < ATTEMPTS * SAVES:
                return f"generations are not committed though nothing has happened: {committed}"
            return ""

        return judge

    def wrong(self, base: Path, least: int) -> str:
        """Return what a restart would find that is wrong, at step ``least`` or later, also without
        any one host if there are copies.
        """
        engine = job_folder(base, memory.JOB)
        held = {host: inventory.scan([engine / host / "engine-0"]) for host in set(self.hosts)}
        for lost in ["", *(held if self.copies > 1 else ())]:
            found = self._whole({each: held[each] for each in held if each != lost})
            if max((each.step for each in found), default=0) < least:
                return f"step {least} is committed, and not found without host {lost!r}"
        whole = {each.save_id for each in self._whole(held)}
        torn = [
            path
            for here in held.values()
            for each, path in here.items()
            if each.save_id in whole and hash_of(path.read_bytes()) != _hash_in_record(path)
        ]
        return f"files of whole generations are not whole: {torn}" if torn else ""

    def _whole(self, held: dict[str, dict[inventory.HeldFile, Path]]) -> list[inventory.Generation]:
        told = [
            list(held.get(host, ())) if host not in self.hosts[:rank] else []
            for rank, host in enumerate(self.hosts)
        ]
        return [each for each in inventory.generations(self.hosts, told) if each.is_complete()]


def _hash_in_record(file: Path) -> str:
    path = record_path(file)
    return RankRecord.parse(path.read_bytes(), path).report.file.hash


JOBS = {
    "two ranks of a host": Job(["a", "a"], 1),
    "two hosts with copies": Job(["a", "b"], 2),
    "three hosts with copies": Job(["a", "b", "c"], 2),
}


@pytest.fixture(autouse=True)
def processes() -> Iterator[None]:
    with memory.processes():
        yield


@pytest.mark.parametrize(
    "settings, few", [(SETTINGS, 8), (COMMITTING, 40)], ids=["anywhere", "committing"]
)
@pytest.mark.parametrize("job", JOBS)
def test_what_was_committed_stays(
    job: str, settings: Any, few: int, schedules: Callable[..., int]
) -> None:
    explore(JOBS[job], schedules(few, 2 * len(JOBS)), **settings)
