"""The status of ranks that wait: their posts, the digest of all, and the proof of a hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hf_zero.distributed import rank_status
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.rank_status import RankStatus
from hf_zero.errors import RankMismatchError
from tests.protocols.explore import Judge, explore
from tests.protocols.ranks import World
from tests.protocols.simulation import Simulation, running

TIMEOUT, LOOKS = 120.0, 2.0
SETTINGS = {"delays": (0.3, 5.0, 30.0), "deaths": 1, "seconds": 1000.0}


def circle(size: int, simulation: Simulation) -> Judge:
    """Each rank waits for the next, which has not issued its collective: a hang. Each finds the
    proof, or the death of a rank, within a few looks.
    """

    def wait(world: World, rank: int) -> None:
        store = world.store("ranks")
        status = RankStatus(store, rank, size)
        logs = [
            status.register(CollectiveLog(f"log {n}", (n, (n + 1) % size), TIMEOUT, native=False))
            for n in range(size)
        ]
        simulation.sleep(1.0)
        pending = logs[rank].issue("gather")
        status.publish("waits", pending=pending)
        begun = simulation.now
        while simulation.now - begun < TIMEOUT:
            found = status.diagnose(pending)
            if found is not None:
                status.publish("broken", found.cause)
                raise RankMismatchError(found.text)
            simulation.sleep(LOOKS)
        if not simulation.killed:  # one that dies before it has said who it is proves nothing
            world.fault = f"rank {rank} has no proof after {TIMEOUT / LOOKS:.0f} looks"

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
    return f"host {process} {'gone' if process in dead else 1}"


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
