"""The schedule of gathers alone, over units without memory: what it prefetches is what it tells the
other ranks.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.zero.gather.schedule import MAX_PREFETCHED_UNITS, Next, Schedule, count_prefetched
from hf_zero.zero.gather.unit import GatherState


class Stub:
    """A sharded unit of ``nbytes``, which is gathered at once."""

    source = None
    in_use = False
    needs_no_peer = False

    def __init__(self, index: int, nbytes: int, launched: list[int]):
        self.index, self.nbytes, self._launched = index, nbytes, launched
        self.label, self.sharded_flats, self.flats = str(index), [object()], []
        self.state = GatherState.RELEASED
        self.guard = SimpleNamespace(pins=0, module_runs=lambda module: None)

    def launch_gather(self, exact: bool = False, backward: bool = False) -> None:
        self._launched.append(self.index)
        self.state = GatherState.GATHERING

    def finish_gather(self) -> None:
        self.state = GatherState.GATHERED

    def release(self) -> None:
        self.state = GatherState.RELEASED


def schedule_of(sizes: list[int], ahead: int) -> tuple[Schedule, list[Any], list[int]]:
    """Return the schedule of one rank that has to agree with nobody, its units, and the indices of
    those whose gather it has launched.
    """
    launched: list[int] = []
    units: list[Any] = [Stub(index, size, launched) for index, size in enumerate(sizes)]
    passes = SimpleNamespace(begin=lambda what, kind: None, end=lambda: None)
    shard = SimpleNamespace(gathers_in_stages=False, advance_gathers=lambda: None)
    mesh: Any = SimpleNamespace(passes=passes, shard=shard, consensus=None, pp_stage_ranks=1)
    schedule = Schedule(units, mesh, SimpleNamespace(), ahead)  # type: ignore[arg-type]
    reducer = SimpleNamespace(reach=None, launched=0, finish_beyond=lambda number: None)
    schedule.connect(reducer, lambda: None, None)  # type: ignore[arg-type]
    return schedule, units, launched


def run_pass(schedule: Schedule, units: list[Any]) -> list[int]:
    """Return the number of gathers issued once each unit was needed."""
    issued = []
    schedule.begin(("forward",))
    for unit in units:
        schedule.ensure_gathered(unit)
        issued.append(schedule.issued)
    schedule.end(keep_last=False)
    return issued


@pytest.mark.parametrize("seed", range(20))
def test_other_ranks_know_how_many_units_are_prefetched(seed: int) -> None:
    draws = random.Random(seed)
    sizes = [draws.choice([1, 2, 5, 9]) for _ in range(12)]
    schedule, units, launched = schedule_of(sizes, ahead=draws.choice([0, 1, 4, 8, 100]))
    assert run_pass(schedule, units) == list(range(1, 13))  # recorded, one by one
    launched.clear()
    issued = run_pass(schedule, units)
    depths = schedule.depths_of_last_pass()
    assert [depths.of_units[unit.index] for unit in units] == issued
    # of a plan, every unit's gather in order, once
    assert launched == list(range(12)) and depths.whole == 12
    assert depths.after == [count_prefetched(sizes, schedule._ahead_bytes), *issued]


def test_the_first_unit_may_exceed_the_limit_and_no_limit_prefetches_none() -> None:
    assert count_prefetched([9, 1], 4) == 1 and count_prefetched([1, 9], 4) == 1
    assert count_prefetched([1] * 9, 100) == MAX_PREFETCHED_UNITS
    assert count_prefetched([1, 1], 0) == count_prefetched([], 4) == 0


def test_a_gather_that_a_rank_needs_comes_before_the_end_of_a_pass() -> None:
    assert max((Next.END_OF_PASS, 99), (Next.GATHER, -99))[0] is Next.GATHER


def test_a_unit_out_of_reach_is_fetched() -> None:
    """This rank may not wait for it before its next reduction."""
    schedule, units, launched = schedule_of([1] * 4, ahead=0)
    run_pass(schedule, units)
    launched.clear()
    fetched: list[int] = []

    def fetch(unit: Any) -> None:
        fetched.append(unit.index)
        unit.state = GatherState.GATHERING

    schedule.shards.fetch = fetch  # type: ignore[method-assign,assignment]
    schedule._mesh.consensus = SimpleNamespace()  # type: ignore[assignment]
    schedule._reducer.reach = 2
    schedule.begin(("forward",))
    for unit in units[:3]:
        schedule.ensure_gathered(unit)
    assert launched == [0, 1] and fetched == [2]
