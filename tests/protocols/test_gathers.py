"""The agreement on the next gather, which ranks that ask alone may leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.consensus import GatherAgreement
from hf_zero.distributed.store import StoreWait
from hf_zero.distributed.watchdog import Watchdog
from tests.protocols.explore import Judge, explore
from tests.protocols.ranks import World
from tests.protocols.simulation import Simulation

TIMEOUT, UNITS = 20.0, 2
SETTINGS = {"delays": (0.3, 1.5, 45.0), "deaths": 1, "seconds": 600.0}


def gathers(size: int, asking: tuple[int, ...], simulation: Simulation) -> Judge:
    """All ranks gather two units; those ``asking`` may leave, and take the last rank for one that
    is elsewhere, as an old post may say.
    """

    def gather(world: World, rank: int) -> None:
        key_store = world.store()
        watchdog = Watchdog(enabled=False)
        status: Any = SimpleNamespace(
            world=size, elsewhere=lambda ranks: [each for each in ranks if each == size - 1]
        )
        watchdog.rank_status = status
        waits = StoreWait(key_store, rank, TIMEOUT, watchdog)
        log = CollectiveLog("agreements", range(size), TIMEOUT, native=False)
        agreement = GatherAgreement(key_store, rank, range(size), waits, log)
        agreement._left = rank in asking  # it gave up before: it looks at once
        issued, number = set[int](), 0
        for unit in range(UNITS):
            while unit not in issued:
                agree: Any = agreement.agree_or_leave if rank in asking else agreement.agree
                agreed = agree("outside passes", (0, unit), "gather of {0[1]}".format)
                if agreed is None:  # it fetches the values alone
                    world.simulation.sleep(0.01)
                    issued.add(unit)
                    agreement.end_asking()
                    continue
                number += 1
                issued.add(agreed[1])
                said = world.collective("gathers", rank, f"unit {agreed[1]}")
                if len(set(said)) > 1:
                    world.fault = f"different gathers under number {number}: {said}"

    world = World(simulation, size, gather, TIMEOUT)

    def judge(end: str) -> str:
        errors = world.errors()
        if end or world.fault or not asking:
            return world.judge(end)
        # Ranks may wait in vain for one that has left and does not ask again. The only one that
        # asks gets the outcome, or leaves; a gather that was agreed on is joined by all.
        vain = {
            name: error
            for name, error in errors.items()
            if asking == (int(name.split()[1]),) or "have not come" in str(error)
        }
        return f"a rank waits in vain: {vain}" if vain and simulation.untroubled(10.0) else ""

    return judge


CASES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "all agree": (3, ()),
    "one of two may leave": (2, (0,)),
    "two of three may leave": (3, (0, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_issue_the_same_gathers(case: str, schedules: Callable[..., int]) -> None:
    explore(partial(gathers, *CASES[case]), schedules(150, len(CASES)), **SETTINGS)


def test_ranks_are_held_up_as_they_withdraw(schedules: Callable[..., int]) -> None:
    held = {"delays": (0.3,), "seconds": 600.0, "at": "/0/n -1"}
    explore(partial(gathers, *CASES["two of three may leave"]), schedules(300), **held)
