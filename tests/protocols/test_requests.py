"""Requests of a rank to all others, and events that all ranks learn of after the same step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.rank_requests import StepEvents
from hf_zero.distributed.shard_fetches import ShardFetches
from hf_zero.distributed.store import StoreWait
from tests.protocols.explore import Judge, explore
from tests.protocols.ranks import World
from tests.protocols.simulation import Simulation

STEPS, TIMEOUT = 4, 30.0
SETTINGS = {"delays": (0.02, 1.5, 70.0), "deaths": 1, "seconds": 600.0}
EVENT = -2


class Shard:
    """Shards of one rank: their content says whose they are, and of which epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def read(self, unit: int, epoch: int) -> bytes:
        return bytes([self.rank, unit, epoch])


class Job:
    """A job whose ranks do, in their steps, what ``asks`` says: (rank, step, what)."""

    def __init__(self, size: int, asks: list[tuple[int, int, str]]) -> None:
        self.size, self.asks = size, asks

    def __call__(self, simulation: Simulation) -> Judge:
        world = World(simulation, self.size, self.train, TIMEOUT)
        return partial(world.judge, result=lambda: self.result(world))

    def train(self, world: World, rank: int) -> None:
        store = world.store()
        waits = StoreWait(store, rank, TIMEOUT, Watchdog())
        events = StepEvents(store, rank, range(self.size), waits)
        fetches, shard = (
            ShardFetches(store, rank, range(self.size), events, waits, list),
            Shard(rank),
        )
        world.kept += [fetches, shard]
        world.results[rank] = []
        fetches.serve(shard.read)
        try:
            self.steps(world, rank, events, fetches)
            fetches.serve_until_others_end()  # as a script does that has ended well
            fetches.serving.end()
            fetches.announce_exit()
        finally:
            fetches.close()

    def steps(self, world: World, rank: int, events: StepEvents, fetches: ShardFetches) -> None:
        told = world.results[rank]
        for step in range(STEPS):
            for what in (what for own, at, what in self.asks if (own, at) == (rank, step)):
                self.ask(what, world, rank, events, fetches)
            renew = events.end_step()
            told.append((step, renew, events.stopped, sorted(events.events)))
            if events.stopped:
                break
            world.collective("training", rank, f"step {step}")
            with fetches.writes:
                fetches.epoch += 1

    def ask(
        self, what: str, world: World, rank: int, events: StepEvents, fetches: ShardFetches
    ) -> None:
        peers = [each for each in range(self.size) if each != rank]
        if what == "stop":
            events.request_stop()
        elif what == "event":
            events.broadcast_event(EVENT)
        else:
            fetch: Any = fetches.fetch if what == "fetch" else fetches.fetch_alone
            try:
                found = fetch(3, "unit 3", peers, 3)
            except KeyboardInterrupt:
                if what == "alone":  # a notebook's user goes on
                    return
                raise
            if found != {each: bytes([each, 3, fetches.epoch]) for each in peers}:
                world.fault = f"fetched {found} in epoch {fetches.epoch}"

    def result(self, world: World) -> str:
        told: dict[int, list[Any]] = world.results
        least = min(map(len, told.values()))
        if len({str(steps[:least]) for steps in told.values()}) > 1:
            return f"ranks act at different steps: {told}"
        if world.errors():
            return ""
        alive = {str(told[process.rank]) for process in world.processes if process.alive}
        if len(alive) > 1:
            return f"ranks end at different steps: {told}"
        if any(what == "stop" for *_, what in self.asks):
            return ""  # a request that ranks hear of after their last step is not read
        left = [key for key in world.server.data if "/fetch/" in key and not key.endswith("/n")]
        return f"keys are left: {left}" if left and world.simulation.untroubled(1.0) else ""


JOBS = {
    "one stops": Job(2, [(0, 1, "stop")]),
    "two stop": Job(2, [(0, 1, "stop"), (1, 1, "stop")]),
    "all stop": Job(3, [(0, 1, "stop"), (1, 1, "stop"), (2, 1, "stop")]),
    "stop and event": Job(3, [(1, 1, "stop"), (2, 1, "event")]),
    "fetches": Job(3, [(0, 1, "fetch"), (1, 1, "fetch")]),
    "stop and fetches": Job(3, [(0, 1, "stop"), (1, 1, "alone"), (2, 1, "fetch")]),
}


INTERRUPTED = {"delays": (0.02,), "interrupts": 1, "seconds": 600.0}


@pytest.mark.parametrize("job", JOBS)
def test_requests_are_answered(job: str, schedules: Callable[..., int]) -> None:
    explore(JOBS[job], schedules(100, len(JOBS)), **SETTINGS)


@pytest.mark.parametrize("job", ["two stop", "stop and event", "stop and fetches"])
def test_a_rank_is_interrupted(job: str, schedules: Callable[..., int]) -> None:
    """One that goes on is heard later; what one leaves undone ends the others with its name."""
    explore(JOBS[job], schedules(150, 3), **INTERRUPTED)


def test_a_rank_is_held_up_as_it_ends_a_step(schedules: Callable[..., int]) -> None:
    """Its serving thread answers meanwhile with the step that ends."""
    held = {"delays": (0.02, 1.5), "seconds": 600.0, "at": "a lock"}
    explore(JOBS["one stops"], schedules(60), **held)
