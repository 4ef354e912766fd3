"""The status of ranks that wait: their posts, the digest of all, and the proof of a hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hf_zero.distributed import rank_status
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.rank_status import PostedStatus
from hf_zero.errors import RankMismatchError
from tests.protocols.explore import Judge, explore
from tests.protocols.ranks import World
from tests.protocols.simulation import Simulation, running

TIMEOUT, POLLS = 120.0, 2.0
SETTINGS = {"delays": (0.3, 5.0, 30.0), "deaths": 1, "seconds": 1000.0}
# one that is held up as it writes a post or a digest
HELD = {"delays": (5.0, 30.0), "seconds": 5000.0, "at": "set ranks/"}


def wait_for_proof(
    world: World, status: PostedStatus, log: CollectiveLog, limit: Callable[[], float]
) -> None:
    """Issue a collective on ``log``, and wait for the proof that it never ends; note that there is
    none after ``limit()`` seconds.
    """
    simulation = world.simulation
    pending = log.issue("gather")
    status.publish("waits", pending=pending)
    begun = simulation.now
    while simulation.now - begun < limit():
        found = status.diagnose(pending)
        if found is not None:
            status.publish("broken", found.cause)
            raise RankMismatchError(found.text)
        simulation.sleep(POLLS)
    if not simulation.killed:  # one that dies before it has said who it is proves nothing
        world.fault = f"rank {status.rank} has no proof after {TIMEOUT / POLLS:.0f} polls"


def chain(simulation: Simulation) -> Judge:
    """Ranks of four hosts: the last one ends, one waits for it, and two wait for that one. The one
    that reads the posts of all may be another than the one that needs them.
    """
    members = {"joint": (0, 1, 2), "last": (2, 3)}

    def run(world: World, rank: int) -> None:
        status = PostedStatus(world.store("ranks"), rank, 4)
        logs = {
            name: status.register(CollectiveLog(name, ranks, TIMEOUT, reports_dead_peers=False))
            for name, ranks in members.items()
        }
        simulation.sleep(1.0)
        if rank == 3:
            simulation.sleep(POLLS / 2)
            status.publish_exit()
        else:
            log = logs["last" if rank == 2 else "joint"]
            wait_for_proof(world, status, log, lambda: TIMEOUT + simulation.delayed)

    world = World(simulation, 4, run, TIMEOUT, hosts=["a", "b", "c", "d"])

    def judge(end: str) -> str:
        if not end and not world.fault and len(world.errors()) < 3:
            return "a rank ends without an error"
        return world.judge(end, ends_well=False)

    return judge


def circle(size: int, simulation: Simulation) -> Judge:
    """Each rank waits for the next, which has not issued its collective: a hang. Each finds the
    proof, or the death of a rank, within a few polls.
    """

    def wait(world: World, rank: int) -> None:
        store = world.store("ranks")
        status = PostedStatus(store, rank, size)
        logs = [
            status.register(
                CollectiveLog(f"log {n}", (n, (n + 1) % size), TIMEOUT, reports_dead_peers=False)
            )
            for n in range(size)
        ]
        simulation.sleep(1.0)
        wait_for_proof(world, status, logs[rank], lambda: TIMEOUT)

    world = World(simulation, size, wait, TIMEOUT)

    def judge(end: str) -> str:
        if end or world.fault:
            return end or world.fault
        if len(world.errors()) < size and not simulation.killed:
            return "a rank ends without an error"
        return world.judge(end, ends_well=False)

    return judge


def identity(process: int) -> str:
    """Host, process and start of a rank's process, in place of what /proc says."""
    simulation = running()
    assert simulation is not None
    dead = [each.rank for each in simulation.killed]
    host = "host" if simulation.current is None else simulation.current.process.host
    return f"{host} {process} {'gone' if process in dead else 1}"


@pytest.fixture(autouse=True)
def simulated_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def process() -> int:
        simulation = running()
        assert simulation is not None and simulation.current is not None
        return simulation.current.process.rank

    monkeypatch.setattr(rank_status, "_identity", identity)
    monkeypatch.setattr(rank_status, "os", type("Os", (), {"getpid": staticmethod(process)}))


@pytest.mark.parametrize("size", [2, 3])
def test_a_hang_is_proved(size: int, schedules: Callable[..., int]) -> None:
    explore(partial(circle, size), schedules(100, 2), **SETTINGS)


def test_an_end_is_heard_of(schedules: Callable[..., int]) -> None:
    explore(chain, schedules(100), **HELD)
