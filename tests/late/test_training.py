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


def test_collectives_in_few_bits_without_a_report() -> None:
    """Their kernels' references run on the device; what they lose shows in the losses."""
    launch.needs_the_device()
    jobs = (
        "stage 1, gradients in 4 bits",
        "stage 2, both ways in 4 bits",
        "stage 2, in 4 bits, optimizer on the host",
        "stage 3, weights in 8 bits, gradients in 4",
    )
    rows = launch.run_ranks("tests.late.sweep", "random", *jobs)
    assert len(rows) == 2 * len(jobs)
    assert [row for row in rows if row["reports"] or not 1e-7 < row["worst"] < 0.03] == []


def test_whole_matrices_without_a_report() -> None:
    """Orthogonalised in bf16: another order of a sum shows in the second place of an update."""
    launch.needs_the_device()
    jobs = ("stage 0, Muon", "stage 2, Muon", "stage 3, Muon")
    rows = launch.run_ranks("tests.late.sweep", "random", *jobs)
    assert len(rows) == 2 * len(jobs)
    assert [row for row in rows if row["reports"] or not row["worst"] < 0.01] == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eager", *(f"random:{seed}" for seed in range(10, 90, 10))])
def test_jobs_train_without_a_report_however_late(mode: str) -> None:
    launch.needs_the_device()
    assert wrong(mode) == []
