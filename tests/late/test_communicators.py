"""Communicators: as many are made as preflight foresees."""

from __future__ import annotations

import pytest

from tests.helpers.cells import fast
from tests.late import launch


@pytest.mark.parametrize("ranks", fast([2, 4], (2).__eq__))
def test_as_many_communicators_are_made_as_foreseen(ranks: int) -> None:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.communicator_counts", ranks=ranks, hosts=ranks // 2)
    assert len(rows) == 10 * ranks
    assert [row for row in rows if row["made"] != row["foreseen"]] == []
