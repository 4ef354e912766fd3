"""The ranks of an attempt meet in the store that earlier attempts have used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from hf_zero.distributed import attempts
from hf_zero.errors import LaunchError
from tests.protocols import store
from tests.protocols.explore import Judge, explore
from tests.protocols.simulation import START, Process, Simulation

SECONDS, RANKS = 8.0, 1024
SETTINGS = {"delays": (0.1, 0.6, 3.0, 12.0), "deaths": 1, "seconds": 100.0}
# what an earlier attempt has left: nothing; all it wrote; the answers of some ranks
LEFT = {
    "none": {},
    "whole": {"token": b"old|", "old/1": b"", "old/2": b""},
    "late": {"token": b"old|rank 0 has waited", "old/1": b""},
    "cut": {"token": b"old", "old/1": b""},
}
CASES = [(2, "none"), (2, "whole"), (3, "none"), (3, "whole"), (3, "late"), (3, "cut")]


def meeting(world: int, left: str, simulation: Simulation) -> Judge:
    """All ranks of a second attempt meet, or raise at the timeout."""
    server = store.Server(simulation)
    server.data |= {f"{attempts.PREFIX}/{key}": value for key, value in LEFT[left].items()}
    found: dict[int, str] = {}

    def rank(own: int) -> None:
        limit = timedelta(seconds=SECONDS)
        made = attempts.store_of_attempt(store.Client(server), own, world, limit)
        found[own] = made.prefix

    processes = [Process(own) for own in range(world)]
    for process in processes:
        simulation.spawn(f"rank {process.rank}", partial(rank, process.rank), process)

    def judge(end: str) -> str:
        if end:
            return end
        errors = [task.error for task in simulation.ended if task.error is not None]
        if not all(isinstance(error, LaunchError) for error in errors):
            return f"another error: {errors}"
        if errors and simulation.untroubled(SECONDS / 2):
            return f"an error though all have come: {errors}"
        if len(set(found.values())) > 1:
            return "the ranks have different stores"
        if "old" in found.values():
            return "a rank has the store of an earlier attempt"
        late = simulation.now - START > 2 * SECONDS + simulation.delayed + 1.0
        return "a rank ends late" if late else ""

    return judge


@pytest.fixture(autouse=True)
def simulated_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "dist", store.DIST)


@pytest.mark.parametrize("world, left", CASES)
def test_ranks_meet(world: int, left: str, schedules: Callable[..., int]) -> None:
    explore(partial(meeting, world, left), schedules(600, len(CASES)), **SETTINGS)
