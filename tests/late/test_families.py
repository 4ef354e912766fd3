"""Deep models on two ranks of the simulated device, which poses as CUDA: no report, and the
losses of CPU ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.helpers import launched
from tests.late import families, launch

FP32, ROUNDED = 7e-6, 0.0625  # relative; of a number below 8 in bf16, absolute

# The fast suite: what depth has shown defects in.
FAST = ("all on the host, saved", "stage 3, activations on the host")
FAST_PARTS = {
    "parts of matrices": "stage 3, parts of matrices, checkpointed",
    "parts of sequences": "all on the host, parts of sequences",
    "experts": "stage 2, experts",
}


def trained(
    mode: str, family: str, steps: int, names: Sequence[str], env: dict[str, str], seconds: float
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows that two ranks print, by case and rank."""
    with TemporaryDirectory() as folder:
        words = (mode, family, folder, str(steps), *names)
        rows = launch.run_ranks("tests.late.families", *words, seconds=seconds, env=env)
    return {(row["case"], row["rank"]): row for row in rows}


def wrong(family: str, mode: str, steps: int, *names: str, seconds: float = 600) -> list[str]:
    """Return the differences from CPU ranks, and the reports of the device."""
    expected = trained("cpu", family, steps, names, launched.environment(), seconds)
    got = trained(mode, family, steps, names, launch.environment(as_cuda=True), seconds)
    assert got.keys() == expected.keys() and len(got) == 2 * len(names or families.names_of(family))
    found = []
    for key, row in got.items():
        losses, plain = row["losses"], expected[key]["losses"]
        rounded = "bf16" in key[0] or "fp16" in key[0] or key[0].endswith(", saved")
        far = max(
            abs(a - b) / (1 if rounded else abs(b)) for a, b in zip(losses, plain, strict=True)
        )
        if row["reports"]:
            found.append(f"{mode} {family} {key}: {row['reports'][:2]}")
        if not far < (ROUNDED if rounded else FP32):
            found.append(f"{mode} {family} {key}: {far} off, {losses} instead of {plain}")
    return found


def test_a_deep_model_trains_without_a_report() -> None:
    launch.needs_the_device()
    assert wrong("bert", "random", 4, *FAST) == []


@pytest.mark.parametrize("axis", families.PARALLEL)
def test_what_ranks_hold_in_parts(axis: str) -> None:
    launch.needs_the_device()
    assert wrong(families.FAMILY.get(axis, "llama"), "random", 2, FAST_PARTS[axis]) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "aliased"])
@pytest.mark.parametrize("axis", families.PARALLEL)
def test_parts_in_every_configuration(axis: str, mode: str) -> None:
    launch.needs_the_device()
    family = families.FAMILY.get(axis, "llama")
    assert wrong(family, mode, 2, *families.PARALLEL[axis]) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random:10", "random:20", "eager", "aliased"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_configuration(family: str, mode: str) -> None:
    launch.needs_the_device()
    assert wrong(family, mode, families.STEPS, seconds=3000) == []
