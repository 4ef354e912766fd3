"""Communicators: as many are made as preflight foresees."""

from __future__ import annotations

import pytest

from tests.late import launch

FAST = ("pipeline", "stage 2, optimizer on the host", "stage 3, replicas", "stage 3, experts")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, FAST), *(pytest.param(ranks, (), marks=pytest.mark.long) for ranks in (2, 4))],
)
def test_as_many_communicators_are_made_as_foreseen(ranks: int, cases: tuple[str, ...]) -> None:
    launch.needs_the_device()
    hosts = ranks // 2
    rows = launch.run_ranks("tests.late.communicator_counts", *cases, ranks=ranks, hosts=hosts)
    assert len(rows) == (len(cases) or 10) * ranks
    assert [row for row in rows if row["made"] != row["foreseen"]] == []
