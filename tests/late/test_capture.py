"""Captured steps on the simulated device: equal to the same steps as they are, bit for bit, without
a wait, a question or an allocation in a launch; and faults show.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.pairs import OF_TORCHAO
from tests.late import launch
from tests.late.capture import BESIDE

FAST = (
    "dropout",
    "bf16, two micro-batches",
    "write",
    "other_shape",
    "freeze",
    "change_accumulation",
)
METRICS = "two micro-batches, metrics"
CLEAN = ("waits", "queries", "allocations")


@pytest.mark.parametrize(
    ("ranks", "mode", "stages", "cases"),
    [
        (1, "lazy", "02", FAST),
        (2, "random:3", "01", ("three micro-batches, dropout", "write", METRICS)),
        *(
            pytest.param(ranks, mode, "012", (), marks=pytest.mark.long)
            for ranks in (1, 2)
            for mode in ("eager", "lazy", "random:5", "aliased")
        ),
    ],
)
def test_captured_steps_equal_uncaptured_ones(
    ranks: int, mode: str, stages: str, cases: tuple[str, ...]
) -> None:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.capture", mode, stages, *cases, ranks=ranks)
    assert len(rows) >= ranks * len(stages) * (len(cases) or 15)
    for row in rows:
        assert not row["differ"] and not row["reports"], row
        assert not any(row[what] for what in CLEAN), row
        assert row["launches"] >= 8, row  # six steps of nine; those after a change in parts


@pytest.mark.long
@pytest.mark.parametrize("stages", ["0", "12"])
def test_captured_steps_equal_uncaptured_ones_beside_each_feature(stages: str) -> None:
    """Of those that go with them."""
    launch.needs_the_device()
    has_torchao = importlib.util.find_spec("torchao") is not None
    names = [name for name in BESIDE if has_torchao or name not in OF_TORCHAO]
    rows = launch.run_ranks("tests.late.capture", "random:3", stages, "beside", *names, ranks=2)
    assert len(rows) == 2 * len(stages) * len(names)
    for row in rows:
        assert not row["differ"] and not row["reports"] and row["launches"] >= 8, row
        assert not any(row[what] for what in CLEAN), row


def test_a_captured_step_launches_what_an_uncaptured_one_does() -> None:
    """Beside copies of the batch and of the gradient of the loss; only what the host would read is
    not there. Attention without a mask, for one, has the same kernel.
    """
    launch.needs_the_device()
    (row,) = launch.run_ranks("tests.late.capture", "eager", "operators", ranks=1)
    assert row["total"] > 2000 and row["more"] == {"copy": 2}, row
    read_back = {"_local_scalar_dense", "copy to host"}
    of_positions = {f"{name}.out" for name in ("cat", "cumsum", "sub")}
    of_positions |= {"all.all_out", "eq.Scalar_out", "ne.Scalar_out"}
    assert row["fewer"].keys() <= read_back | of_positions, row


def test_faults_show() -> None:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.capture", "random:3", "faults", ranks=1)
    assert len(rows) == 9 and all(row["caught"] for row in rows), rows


def test_the_tests_for_gpus_pass() -> None:
    """The refusals among them, and resumed trainings."""
    launch.needs_the_device()
    own = launch.environment(
        as_cuda=True, HF_ZERO_BACKEND="hf_zero", HF_HUB_OFFLINE="1", LATE_DEVICES="1"
    )
    path = ("-p", "tests.late.capture", "tests/gpu/test_capture.py")
    chosen = "refused or resumed and 1 or waits or logits or outside or destroyed or hooks or part"
    launch.pass_tests(own, *path, "-k", chosen, seconds=300)
