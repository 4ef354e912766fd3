"""The engine on two ranks of the device: no report, and the losses of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.late import launch


def wrong(mode: str) -> list[Any]:
    """Rows of the sweep that are not right."""
    rows = launch.run_ranks("tests.late.sweep", mode)
    assert len(rows) == 2 * 17
    return [row for row in rows if row["reports"] or not row["worst"] < 1e-5]


def test_jobs_train_without_a_report() -> None:
    launch.needs_the_device()
    assert wrong("random") == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eager", *(f"random:{seed}" for seed in range(10, 90, 10))])
def test_jobs_train_without_a_report_however_late(mode: str) -> None:
    launch.needs_the_device()
    assert wrong(mode) == []
