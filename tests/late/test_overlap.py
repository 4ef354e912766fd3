"""Overlap of the engine's work with the computation, in simulated time: counted by rates, not
measured.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.late import launch


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.overlap")
    assert len(rows) == 2 * 7
    return {row["case"]: row for row in rows if row["rank"] == 1}


def test_no_gather_is_exposed_where_computing_takes_longer(
    cases: dict[str, dict[str, Any]],
) -> None:
    prefetched, plain = cases["gathers, prefetched"], cases["gathers, not prefetched"]
    assert prefetched["gathers"] == plain["gathers"] >= 12
    assert plain["exposed"] > 0.9 * plain["seconds"], "the measure sees exposed gathers"
    assert prefetched["exposed"] < 0.01 * prefetched["seconds"]


def test_both_hops_of_a_gather_run_beside_the_computation() -> None:
    """On four ranks of two hosts; the first block has nothing to be gathered beside."""
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.overlap", "over hosts", ranks=4, hosts=2)
    assert len(rows) == 4 * 2
    for row in rows:
        assert row["gathers"] >= 2 * 12
        share = row["exposed"] / row["seconds"]
        assert share < 0.25 if row["case"] == "in two hops, prefetched" else share > 0.9, row


def test_sums_of_gradients_run_beside_those_of_weights(cases: dict[str, dict[str, Any]]) -> None:
    plain = cases["sums of gradients, nothing beside them"]
    assert plain["sums"] == 2 * 8 + 1 and plain["beside"] == 0, "the measure sees none"
    found = cases["sums of gradients"]
    assert found["sums"] == plain["sums"] and found["beside"] > 0.99 * found["seconds"]


def test_the_hosts_update_runs_beside_the_device(cases: dict[str, dict[str, Any]]) -> None:
    waited = cases["updates that a step waits for"]
    assert waited["seconds"] > 0 and waited["beside forward"] == waited["beside backward"] == 0, (
        "the measure sees none"
    )
    clipped = cases["updates beside the next forward"]
    at_once = cases["updates beside the backward"]
    assert clipped["beside forward"] > 0.5 * clipped["seconds"]
    assert at_once["beside backward"] > 0.5 * at_once["seconds"]
