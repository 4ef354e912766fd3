"""Weights are sent, torch's state dicts are taken, saved beside the training and put back, and
generations in memory are whole, on two ranks of the device: without a report, and without a wait of
the host where weights stay on the device.
"""

from __future__ import annotations

import pytest

from tests.late import launch, training

JOBS = (
    "stage 2",
    "stage 3",
    "stage 2, optimizer on the host",
    "stage 3, all on the host",
    *training.IN_MEMORY,
    *training.CAPTURABLE,
)


def check(mode: str, *jobs: str) -> None:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.ways_out", mode, *jobs)
    assert sorted(row["job"] for row in rows) == sorted(jobs * 2)
    assert [row for row in rows if row["wrong"] or row["waits"] or row["reports"]] == []


def test_of_shards_on_the_host_and_in_memory() -> None:
    check("lazy", "stage 3, all on the host", "stage 2, kept in memory", "stage 2, capturable")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eager", "random", "lazy", "aliased"])
def test_of_every_job(mode: str) -> None:
    check(mode, *JOBS)
