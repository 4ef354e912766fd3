"""The ranks of an attempt meet in the store that earlier attempts have used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from hf_zero.distributed import attempts
from hf_zero.errors import LaunchError
from tests.protocols import store
from tests.protocols.explore import Judge, explore, find, seed_fault
from tests.protocols.simulation import START, Process, Replay, Simulation, entered

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


def requests_of_a_start(late: float) -> list[int]:
    """Return the requests of ranks 0 and 1 of 1,024, the others of which come ``late`` seconds
    after them.
    """
    simulation, limit = Simulation(Replay(), seconds=2 * late + 100), timedelta(seconds=600)
    server = store.Server(simulation)
    clients = [store.Client(server) for _ in range(3)]

    def answer_for_the_others() -> None:
        simulation.sleep(late)
        shared = store.PrefixStore(attempts.PREFIX, clients[2])
        token = shared.get("token").decode()
        shared.multi_set([f"{token}/{rank}" for rank in range(2, RANKS)], [""] * (RANKS - 2))

    calls = [
        partial(attempts.store_of_attempt, clients[rank], rank, RANKS, limit) for rank in (0, 1)
    ]
    with entered(simulation):
        for rank, call in enumerate([*calls, answer_for_the_others]):
            simulation.spawn(f"rank {rank}", call, Process(rank))
        assert not simulation.run() and not simulation.errors
    return [client.requests for client in clients[:2]]


def test_a_wait_takes_one_request_a_second() -> None:
    counts = {late: max(requests_of_a_start(late)) for late in (0.0, 1.0, 10.0, 60.0, 300.0)}
    assert counts[0.0] <= 5 and counts[1.0] <= 12, counts
    for late in (10.0, 60.0, 300.0):
        assert counts[late] <= counts[1.0] + late, counts


def test_the_timeout_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(monkeypatch, attempts, "_looks", ("waited >= seconds", "False"))
    assert "for ever" in find(partial(meeting, 3, "whole"), 500, **SETTINGS).text
