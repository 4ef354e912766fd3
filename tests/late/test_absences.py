"""hf_zero names the rank that does not come to a collective, on a device whose hosts wait for
none; it lets slow ranks be.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.late import launch


def rows(mode: str, *cases: str) -> dict[tuple[str, int], dict[str, Any]]:
    found = launch.run_ranks("tests.late.absences", mode, *cases, seconds=200)
    return {(row["case"], row["rank"]): row for row in found}


def is_quiet(row: dict[str, Any]) -> bool:
    return not (row["raised"] or row["said"] or row["reports"])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "lazy", "eager"])
def test_slow_ranks_go_on_and_one_that_has_left_is_named(mode: str) -> None:
    launch.needs_the_device()
    found = rows(mode, "leaves out blocks", "is slow", "leaves")
    for rank in range(2):
        assert is_quiet(found["leaves out blocks", rank]) and is_quiet(found["is slow", rank]), (
            found
        )
        assert found["leaves out blocks", rank]["worst"] < 1e-5
    row = found["leaves", 0]
    assert row["raised"].startswith("RankMismatchError: rank 0 waits for all-gather of (root), ")
    assert (
        "which rank 1 will never join: it has destroyed its engine" in row["raised"]
        and len(row["said"]) == 1
    )


@pytest.mark.long
def test_a_rank_that_has_died_is_named() -> None:
    launch.needs_the_device()
    row = rows("random", "dies")["dies", 0]
    assert (
        "rank 0 waits for all-gather of (root), " in row["raised"]
        and "rank 1 died without a word" in row["raised"]
    )


@pytest.mark.long
def test_ranks_that_have_parted_are_named_before_the_timeout_ends_them() -> None:
    launch.needs_the_device()
    found = rows("random", "is elsewhere")
    (parted, ended), raised = found["is elsewhere", 0]["said"], found["is elsewhere", 0]["raised"]
    assert (
        "rank 0 waits for all-gather of (root), " in parted
        and "which rank 1 has not issued: it waits for barrier" in parted
    )
    assert raised == f"RankMismatchError: {ended}" and "which is the timeout" in ended
    # whose timeout comes first
    assert "it needs rank 1" in ended or "rank 1 has waited 6 s" in ended
    # by its own timeout, or as rank 0 has ended by then
    there = found["is elsewhere", 1]["raised"]
    assert "rank 1 could not finish barrier" in there or "is the timeout, for barrier" in there
