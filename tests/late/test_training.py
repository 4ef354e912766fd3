"""The engine on two ranks of the device: no report, and the losses of a plain loop; pipelines,
too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.helpers.cells import fast
from tests.late import launch, training

# The fast suite: each kind of collective and copy once; what deep models (test_families.py), faults
# (test_faults.py) and ways out do, too, is left to the long one.
FAST = (
    "stage 3",
    "stage 2, optimizer on the host, updated in the backward",
    "stage 3, Muon",
    "stage 3, in few bits, errors fed back",
    "stage 1, momenta in 1 bit after a step",
)
# Again where streams are handed out twice: what has collectives in several threads or on several
# communicators.
ALIASED = (
    "stage 2, optimizer on the host, updated in the backward",
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
    ends = [(row, *bounds(row["job"])) for row in rows]
    return [row for row, low, high in ends if row["reports"] or not low < row["worst"] < high]


@pytest.mark.parametrize(("mode", "jobs"), [("random", FAST), ("aliased", ALIASED)])
def test_jobs_train_without_a_report(mode: str, jobs: Iterable[str]) -> None:
    launch.needs_the_device()
    assert wrong(mode, jobs) == []


@pytest.mark.parametrize("mode", fast(["random", "eager", "aliased", "lazy"], "random".__eq__))
def test_pipelines_train_without_a_report(mode: str) -> None:
    launch.needs_the_device()
    schedules = ("gpipe", "1f1b", "interleaved_1f1b")
    if mode == "random":
        schedules = schedules[1:]
    rows = launch.run_ranks("tests.late.pipelines", mode, *schedules)
    assert sorted(row["job"] for row in rows) == sorted(schedules * 2)
    assert [row for row in rows if row["reports"] or not row["worst"] < 1e-5] == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "aliased"])
def test_gathers_over_hosts_train_without_a_report(mode: str) -> None:
    launch.needs_the_device()
    assert wrong(mode, training.OVER_HOSTS, 4, 2) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eager", "aliased", *(f"random:{n}" for n in range(10, 90, 20))])
def test_jobs_train_without_a_report_however_late(mode: str) -> None:
    launch.needs_the_device()
    assert wrong(mode, ALL) == []
