"""The engine on two ranks of the device: no report, and the losses of a plain loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.helpers.cells import fast
from tests.late import launch, training

# The fast suite leaves out what differs from another job in the number of micro-batches or in the
# stage alone, and what deep models do, too (test_families.py).
SELDOM = {
    "stage 1",
    "stage 2, optimizer on the host",
    "stage 2, optimizer on the host, small pieces",
    "stage 3, activations on the host",
    "stage 3, half of the optimizer on the host, RMSprop",
    "stage 3, small parameters whole, all else on the host",
    "stage 3, all on the host, one micro-batch",
    "stage 2, Adafactor, optimizer on the host",
    "stage 2",
    "stage 3, one micro-batch",
    "stage 2, optimizer on the host, one micro-batch",
    "stage 3, small parameters whole",
    "stage 3, all on the host",
    "stage 3, all on the host, updated in the backward",
    "stage 0, Muon",
    "stage 2, Muon, optimizer on the host",
    "stage 3, Adafactor",
    "stage 1, gradients in 4 bits",
    "stage 2, in 4 bits, optimizer on the host",
    # what another job does with more beside it
    "stage 2, units that share messages",
    "stage 3, gathers of the backward in the node",
    "stage 2, both ways in 4 bits",
    "stage 3, weights in 8 bits, gradients in 4",
    "stage 1, local steps in 1 bit",
    "stage 3, all on the host, kept in memory",
    *training.BETWEEN_STEPS,  # faults are put into them (test_faults.py)
}
# Again where streams are handed out twice: what has collectives in several threads or on several
# communicators.
ALIASED = (
    "stage 3, one micro-batch",
    "stage 2, optimizer on the host, updated in the backward",
    "stage 3, activations on the host",
    "stage 3, gathers of the backward in the node",
)
ALL = [
    *training.JOBS,
    *training.BY_MATRICES,
    *training.IN_FEW_BITS,
    *training.BETWEEN_STEPS,
    *training.IN_MEMORY,
]


def bounds(job: str) -> tuple[float, float]:
    """Between which the worst difference from a plain loop's losses lies."""
    if job in training.IN_FEW_BITS or "in 8 bits" in job:  # what their collectives lose shows
        return 1e-7, 0.03
    if job in training.BY_MATRICES:  # in bf16, where another order of a sum shows
        return -1.0, 0.01
    return -1.0, 1e-5


def wrong(mode: str, jobs: Iterable[str], ranks: int = 2, hosts: int = 1) -> list[Any]:
    """Rows of the sweep that are not right."""
    jobs = list(jobs)
    rows = launch.run_ranks("tests.late.sweep", mode, *jobs, ranks=ranks, hosts=hosts)
    assert sorted(row["job"] for row in rows) == sorted(jobs * ranks)
    return [
        row
        for row in rows
        if row["reports"] or not bounds(row["job"])[0] < row["worst"] < bounds(row["job"])[1]
    ]


def test_jobs_train_without_a_report() -> None:
    launch.needs_the_device()
    assert wrong("random", [job for job in ALL if job not in SELDOM]) == []


def test_jobs_train_where_streams_are_handed_out_twice() -> None:
    launch.needs_the_device()
    assert wrong("aliased", ALIASED) == []


@pytest.mark.parametrize("mode", fast(["random", "eager", "aliased", "lazy"], "random".__eq__))
def test_pipelines_train_without_a_report(mode: str) -> None:
    launch.needs_the_device()
    schedules = ("gpipe", "1f1b", "interleaved_1f1b")
    rows = launch.run_ranks("tests.late.pipelines", mode, *schedules)
    assert sorted(row["job"] for row in rows) == sorted(schedules * 2)
    assert [row for row in rows if row["reports"] or not row["worst"] < 1e-5] == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "aliased"])
def test_gathers_over_hosts_train_without_a_report(mode: str) -> None:
    launch.needs_the_device()
    assert wrong(mode, training.OVER_HOSTS, 4, 2) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", ["random", "eager", "aliased", *(f"random:{n}" for n in range(10, 90, 10))]
)
def test_jobs_train_without_a_report_however_late(mode: str) -> None:
    launch.needs_the_device()
    assert wrong(mode, ALL) == []
