"""Collectives of the simulated device: what ranks do right passes, and what NCCL does not tell
is reported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.late import deadlocks, launch, rank_programs

REFUSED = "No backend type associated with device type cpu: all_reduce takes tensors of late"
VALUES = {
    "right_sums": [3.0, 3.0],
    "right_wait_orders_the_stream_alone": [True, 6.0],
    "right_backward_issues": 6.0,
    "right_thread_hands_over": [3.0],
    "right_cpu_tensors_are_refused": REFUSED,
    "right_messages": [2.0, 4.0, 1.0],
    "right_single_messages": 2.0,
    # NaN: two different collectives leave garbage, and nothing is said to the program
    "order_of_unequal_sizes": True,
}


@cache
def judged(mode: str) -> Sequence[dict[str, Any]]:
    launch.needs_the_device()
    return launch.run_ranks("tests.late.rank_programs", mode, env=launch.environment())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "lazy", "eager"])
def test_each_program_is_judged_by_its_name(mode: str) -> None:
    rows = judged(mode)
    assert {(row["program"], row["rank"]) for row in rows} == {
        (name, rank) for name in rank_programs.PROGRAMS for rank in range(2)
    }
    for name in rank_programs.PROGRAMS:
        mine = [row for row in rows if row["program"] == name]
        kinds = {kind for row in mine for kind, _ in row["reports"]}
        expected = name.partition("_")[0]
        if expected == "order":  # a rank where one thread issues both
            kinds -= {"interleaved"}
        assert kinds == (set() if expected == "right" else {expected}), f"{name}: {mine}"
        if name in VALUES:
            assert [row["value"] for row in mine] == [VALUES[name]] * 2, name
        if expected == "deadlock":
            assert all(
                "the ranks wait for each other in a circle" in row["value"] for row in mine
            ), name


@pytest.mark.long
def test_a_report_of_order_has_both_sequences() -> None:
    rows = [row for row in judged("random") if row["program"] == "order_swapped"]
    assert len(rows) == 2
    for row in rows:
        ((kind, text),) = row["reports"]
        lines = text.splitlines()
        assert kind == "order" and "collective #1 is" in lines[0]
        by_rank = dict(line.strip().split(": ", 1) for line in lines[1:])
        assert by_rank["rank 0"].startswith("#1 all_reduce Float 64 sum [rank_programs.py")
        # and what else each had issued by then
        assert by_rank["rank 1"].startswith("#1 all_gather Float 64")


# -- circles ---------------------------------------------------------------------------------------


SENT = [(1, 0, "sum")]  # a collective that its stream 0 has yet to run
LACKS_1 = {"issued": 1, "outstanding": SENT, "missing": {1: [1]}}
LACKS_0 = {"issued": 1, "outstanding": SENT, "missing": {1: [0]}}


def status(
    rank: int, streams: Sequence[Any] = (), waits: bool = True, **ends: dict[str, Any]
) -> deadlocks.Status:
    """Where a rank stands; its thread 7 synchronises with its stream 0 if it ``waits``."""
    none = {"rank": rank, "issued": 0, "issuers": [], "outstanding": [], "missing": {}}
    named = enumerate(ends.items())
    communicators = [{"index": index, "name": name, **none, **end} for index, (name, end) in named]
    hosts = [[7, "python", "here", 0, 5]] if waits else []
    found = {"moved": 1, "hosts": hosts, "streams": streams}
    return deadlocks.status_of(rank, found, communicators)


BOTH = {"first": {0: 0, 1: 1}, "second": {0: 0, 1: 1}}


def found(*statuses: deadlocks.Status) -> list[deadlocks.Edge]:
    return deadlocks.circle(deadlocks.edges({each["rank"]: each for each in statuses}, BOTH))


FIRST, SECOND = [[0, -1, 0, 0, 1]], [[0, -1, 0, 1, 1]]  # stream 0 is in a collective of either


def test_hosts_that_wait_for_each_other() -> None:
    """Each waits for what the other would issue next; one that computes ends the wait."""
    zero = status(0, FIRST, first=LACKS_1, second={})
    closed = found(zero, status(1, SECOND, first={}, second=LACKS_0))
    hosts, streams = (
        tuple(f"{what} of rank {n}" for n in (0, 1)) for what in ("thread 7", "stream 0")
    )
    assert {edge[:2] for edge in closed} == {
        *zip(hosts, streams),
        (streams[0], hosts[1]),
        (streams[1], hosts[0]),
    }
    assert "rank 1 has not issued it" in deadlocks.describe(closed)
    assert found(zero, status(1, waits=False, first={})) == []


def test_a_stream_waits_for_the_thread_that_is_to_issue() -> None:
    """Thread 7 of each rank synchronises; the collective that rank 1 lacks may be thread 8's."""
    by_7 = {"issuers": [7]}
    zero = status(0, FIRST, first={**LACKS_1, **by_7}, second=by_7)
    for issuers in ([7], [7, 8]):
        one = status(1, SECOND, first={"issuers": issuers}, second={**LACKS_0, **by_7})
        assert bool(found(zero, one)) == (issuers == [7])


class Played:
    """The device's module of a rank that stands still, in a circle with rank 1."""

    def __init__(self) -> None:
        self.theirs = 0  # looks of rank 1
        self.told: list[str] = []

    def communicators(self) -> list[dict[str, Any]]:
        shared = {"rank": 0, "ranks": 2, "issuers": [7]}
        first = {"index": 0, "name": "first", **shared, **LACKS_1}
        none = {"issued": 0, "outstanding": [], "missing": {}}
        return [first, {"index": 1, "name": "second", **shared, **none}]

    def waits(self) -> dict[str, Any]:
        return {"moved": 3, "hosts": [[7, "python", "here", 0, 5]], "streams": FIRST}

    def status(self, index: int, rank: int) -> str:
        theirs = status(1, SECOND, first={"issuers": [7]}, second=LACKS_0)
        return json.dumps({**theirs, "looks": self.theirs})

    def tell(self, kind: str, text: str) -> None:
        self.told.append(kind)

    def given_up(self, index: int) -> str:
        return ""

    def put_status(self, index: int, text: str) -> None:
        pass

    give_up, end_waits = put_status, given_up


def test_what_a_rank_wrote_long_ago_makes_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch of a rank that gets no time looks no more: where it stands now is not known."""
    monkeypatch.setattr(deadlocks, "QUIET", 0.0)
    played = Played()
    watch = deadlocks.Watch(played, 0)
    for _ in range(10):
        watch._look()
    assert not played.told
    for _ in range(deadlocks.LOOKS):
        assert not played.told
        played.theirs += 1
        watch._look()
    assert played.told == ["deadlock"]


def test_streams_that_wait_for_each_other_through_events() -> None:
    zero = status(0, FIRST, False, first=LACKS_1, second={"issued": 1})
    on_2, on_3 = [(1, 2, "sum")], [(1, 3, "sum")]
    one = status(
        1,
        [[2, 3, 9, -1, 0], [3, -1, 0, 1, 1]],
        False,
        first={"issued": 1, "outstanding": on_2},
        second={**LACKS_0, "outstanding": on_3},
    )
    # rank 0 is in the first and has run the second: nothing leads back
    assert found(zero, one) == []
    zero["communicators"]["1"]["outstanding"] = {"1": [0, "sum"]}
    streams = {"stream 0 of rank 0", "stream 2 of rank 1", "stream 3 of rank 1"}
    assert {edge[0] for edge in found(zero, one)} == streams
