"""hf_zero names the rank that does not come to a collective, on a device whose hosts wait for
none; it lets slow ranks be.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.late import launch


def rows(mode: str, *cases: str) -> dict[tuple[str, int], dict[str, Any]]:
    found = launch.run_ranks("tests.late.absences", mode, *cases, seconds=200)
    return {(row["case"], row["rank"]): row for row in found}


def is_quiet(row: dict[str, Any]) -> bool:
    return not (row["raised"] or row["said"] or row["reports"])


@pytest.mark.parametrize(
    ("mode", "cases"),
    [
        ("aliased", ["leaves out blocks"]),
        pytest.param("aliased", ["fetches a block"], marks=pytest.mark.long),
        *(
            pytest.param(mode, ["leaves out blocks", "fetches a block"], marks=pytest.mark.long)
            for mode in ("random", "lazy", "eager")
        ),
    ],
)
def test_blocks_left_out(mode: str, cases: list[str]) -> None:
    """Ranks that leave out blocks may order reductions otherwise than gathers, which are on two
    communicators for that: nothing else is reported, where all communicators share their streams,
    too.
    """
    launch.needs_the_device()
    found = rows(mode, *cases)
    assert len(found) == 2 * len(cases)
    for (case, rank), row in found.items():
        kinds = {kind for kind, _ in row["reports"]}
        assert kinds <= {"interleaved"} and not row["raised"] and row["worst"] < 1e-5, row
        for _, text in row["reports"]:
            assert "reduce_scatter" in text and "all_gather" in text, text
        fetched = any("outside the recorded order" in each for each in row["said"])
        assert fetched == (case == "fetches a block" and rank == 0), row


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "lazy", "eager", "aliased"])
def test_slow_ranks_go_on_and_one_that_has_left_is_named(mode: str) -> None:
    launch.needs_the_device()
    found = rows(mode, "is slow", "leaves")
    assert is_quiet(found["is slow", 0]) and is_quiet(found["is slow", 1]), found
    row = found["leaves", 0]
    assert row["raised"].startswith("RankMismatchError: rank 0 waits for all-gather of (root), ")
    assert "which rank 1 will never join: it has destroyed its engine" in row["raised"]
    assert len(row["said"]) == 1


@pytest.mark.long
def test_a_rank_that_has_died_or_misses_a_collective_is_named() -> None:
    launch.needs_the_device()
    row = rows("random", "dies")["dies", 0]
    assert "rank 0 waits for all-gather of (root), " in row["raised"]
    assert "rank 1 died without a word" in row["raised"]
    row = rows("random", "misses a collective")["misses a collective", 0]
    assert row["raised"] and row["raised"] == f"RankMismatchError: {row['said'][-1]}", row


@pytest.mark.long
def test_ranks_that_have_parted_are_named_before_the_timeout_ends_them() -> None:
    launch.needs_the_device()
    found = rows("random", "is elsewhere")
    (parted, ended), raised = found["is elsewhere", 0]["said"], found["is elsewhere", 0]["raised"]
    assert "rank 0 waits for all-gather of (root), " in parted
    assert "which rank 1 has not issued: it waits for barrier" in parted
    assert raised == f"RankMismatchError: {ended}" and "which is the timeout" in ended
    # whose timeout comes first
    assert re.search(r"rank 1 on .* has not joined it|rank 1 has waited \d+ s", ended), ended
    # by its own timeout, or as rank 0 has ended or has said that it will by then
    there = found["is elsewhere", 1]["raised"]
    told = r"rank 1 could not finish barrier|is the timeout, for barrier|rank 0 has waited \d+ s"
    assert re.search(told, there), there
