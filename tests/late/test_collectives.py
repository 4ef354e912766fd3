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

VALUES = {
    "right_mean_of_integers": [6, 10],
    "right_mean_under_inference_mode": 1.5,
    "right_sums": [3.0, 3.0],
    "right_gathers_in_the_background": [15.0, 192.0, 600.0],
    "right_wait_orders_the_stream_alone": [True, 6.0],
    "right_backward_issues": 6.0,
    "right_one_is_slow": 3.0,
    "right_streams_cross": [3.0, 3.0],
    "right_thread_hands_over": [3.0],
    "right_cpu_tensors_are_refused": "No backend type associated with device type cpu: all_reduce "
    "takes tensors of late",
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


def status(
    rank: int, hosts: Sequence[Any] = (), streams: Sequence[Any] = (), **ends: dict[str, Any]
) -> deadlocks.Status:
    communicators = [
        {
            "index": index,
            "name": name,
            "rank": rank,
            "issued": 0,
            "issuers": [],
            "outstanding": [],
            "missing": {},
            **end,
        }
        for index, (name, end) in enumerate(ends.items())
    ]
    return deadlocks.status_of(
        rank, {"moved": 1, "hosts": hosts, "streams": streams}, communicators
    )


BOTH = {"first": {0: 0, 1: 1}, "second": {0: 0, 1: 1}}


def found(*statuses: deadlocks.Status) -> list[deadlocks.Edge]:
    return deadlocks.circle(deadlocks.edges({each["rank"]: each for each in statuses}, BOTH))


def test_hosts_that_wait_for_each_other() -> None:
    """Each synchronises with a collective that the other one would issue next."""
    waits: dict[str, Any] = {"hosts": [[7, "python", "here", 0, 5]]}
    zero = status(
        0,
        **waits,
        streams=[[0, -1, 0, 0, 1]],
        first={"issued": 1, "outstanding": [(1, 0, "sum")], "missing": {1: [1]}},
        second={},
    )
    one = status(
        1,
        **waits,
        streams=[[0, -1, 0, 1, 1]],
        first={},
        second={"issued": 1, "outstanding": [(1, 0, "sum")], "missing": {1: [0]}},
    )
    closed = found(zero, one)
    assert {edge[:2] for edge in closed} == {
        ("thread 7 of rank 0", "stream 0 of rank 0"), ("stream 0 of rank 0", "thread 7 of rank 1"),
        ("thread 7 of rank 1", "stream 0 of rank 1"), ("stream 0 of rank 1", "thread 7 of rank 0"),
    }  # fmt: skip
    assert "rank 1 has not issued it" in deadlocks.describe(closed)


def test_a_host_that_computes_ends_the_wait() -> None:
    zero = status(
        0,
        hosts=[[7, "python", "here", 0, 5]],
        streams=[[0, -1, 0, 0, 1]],
        first={"issued": 1, "missing": {1: [1]}},
    )
    assert found(zero, status(1, first={})) == []


@pytest.mark.parametrize("issuers", [[7], [7, 8]], ids=["that waits", "of two, one of which works"])
def test_a_stream_waits_for_the_thread_that_is_to_issue(issuers: list[int]) -> None:
    """Thread 7 of each rank synchronises; the collective that rank 1 lacks may be thread 8's."""
    zero = status(
        0,
        hosts=[[7, "python", "here", 0, 5]],
        streams=[[0, -1, 0, 0, 1]],
        first={"issued": 1, "outstanding": [(1, 0, "sum")], "missing": {1: [1]}, "issuers": [7]},
        second={"issuers": [7]},
    )
    one = status(
        1,
        hosts=[[7, "python", "here", 0, 5]],
        streams=[[0, -1, 0, 1, 1]],
        first={"issuers": issuers},
        second={
            "issued": 1, "outstanding": [(1, 0, "sum")], "missing": {1: [0]}, "issuers": [7],
        },
    )  # fmt: skip
    assert bool(found(zero, one)) == (issuers == [7])


class Played:
    """The device's module of a rank that stands still, in a circle with rank 1."""

    def __init__(self) -> None:
        self.theirs = 0  # looks of rank 1
        self.told: list[str] = []

    def communicators(self) -> list[dict[str, Any]]:
        return [
            {
                "index": place, "name": name, "rank": 0, "ranks": 2, "issued": 1 - place,
                "issuers": [7], "outstanding": [] if place else [(1, 0, "sum")],
                "missing": {} if place else {1: [1]},
            }
            for place, name in enumerate(BOTH)
        ]  # fmt: skip

    def waits(self) -> dict[str, Any]:
        return {"moved": 3, "hosts": [[7, "python", "here", 0, 5]], "streams": [[0, -1, 0, 0, 1]]}

    def status(self, index: int, rank: int) -> str:
        theirs = status(
            1,
            hosts=[[7, "python", "here", 0, 5]],
            streams=[[0, -1, 0, 1, 1]],
            first={"issuers": [7]},
            second={"issued": 1, "outstanding": [(1, 0, "sum")], "missing": {1: [0]}},
        )
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
    zero = status(
        0,
        streams=[[0, -1, 0, 0, 1]],
        first={"issued": 1, "outstanding": [(1, 0, "sum")], "missing": {1: [1]}},
        second={"issued": 1},
    )
    one = status(
        1,
        streams=[[2, 3, 9, -1, 0], [3, -1, 0, 1, 1]],
        first={"issued": 1, "outstanding": [(1, 2, "sum")]},
        second={"issued": 1, "outstanding": [(1, 3, "sum")], "missing": {1: [0]}},
    )
    # rank 0 is in the first and has run the second: nothing leads back
    assert found(zero, one) == []
    zero["communicators"]["1"]["outstanding"] = {"1": [0, "sum"]}
    assert {edge[0] for edge in found(zero, one)} == {
        "stream 0 of rank 0",
        "stream 2 of rank 1",
        "stream 3 of rank 1",
    }
