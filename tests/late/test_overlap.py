"""Overlap of the engine's work with the computation, in simulated time: counted by rates, not
measured.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.late import launch


def cases(job: str, ranks: int = 2, hosts: int = 1) -> dict[str, dict[str, Any]]:
    """The rows of the last rank by their case."""
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.overlap", job, ranks=ranks, hosts=hosts)
    return {row["case"]: row for row in rows if row["rank"] == ranks - 1}


def test_no_gather_is_exposed_where_computing_takes_longer() -> None:
    found = cases("gathers")
    prefetched, plain = found["gathers, prefetched"], found["gathers, not prefetched"]
    assert prefetched["gathers"] == plain["gathers"] >= 12
    assert plain["exposed"] > 0.9 * plain["seconds"], "the measure sees exposed gathers"
    assert prefetched["exposed"] < 0.01 * prefetched["seconds"]


@pytest.mark.long
def test_both_hops_of_a_gather_run_beside_the_computation() -> None:
    """On four ranks of two hosts; the first block has nothing to be gathered beside."""
    for name, row in cases("over hosts", ranks=4, hosts=2).items():
        assert row["gathers"] >= 2 * 12
        share = row["exposed"] / row["seconds"]
        assert share < 0.25 if name == "in two hops, prefetched" else share > 0.9, row


@pytest.mark.long
def test_sums_of_gradients_run_beside_those_of_weights() -> None:
    found = cases("sums")
    plain = found["sums of gradients, nothing beside them"]
    assert plain["sums"] == 2 * 8 + 1 and plain["beside"] == 0, "the measure sees none"
    beside = found["sums of gradients"]
    assert beside["sums"] == plain["sums"] and beside["beside"] > 0.99 * beside["seconds"]


def test_the_hosts_update_runs_beside_the_device() -> None:
    found = cases("updates")
    waited = found["updates that a step waits for"]
    assert waited["seconds"] > 0 and waited["beside forward"] == waited["beside backward"] == 0, (
        "the measure sees none"
    )
    clipped, at_once = (
        found[f"updates beside the {when}"] for when in ("next forward", "backward")
    )
    assert clipped["beside forward"] > 0.5 * clipped["seconds"]
    assert at_once["beside backward"] > 0.5 * at_once["seconds"]
