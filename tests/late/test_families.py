"""Deep models on two ranks of the simulated device, which poses as CUDA: no report, and the
losses of CPU ranks.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.helpers import launched
from tests.late import families, launch

FP32, ROUNDED = 7e-6, 0.0625  # relative; of a number below 8 in bf16, absolute


def wrong(family: str, mode: str, steps: int, *names: str, seconds: float = 600) -> list[str]:
    """Return the differences from CPU ranks, and the reports of the device."""
    rows: list[dict[tuple[str, int], Any]] = []
    for kind, env in (("cpu", launched.environment()), (mode, launch.environment(as_cuda=True))):
        with TemporaryDirectory() as folder:
            words = (kind, family, folder, str(steps), *names)
            told = launch.run_ranks("tests.late.families", *words, seconds=seconds, env=env)
        rows.append({(row["case"], row["rank"]): row for row in told})
    expected, got = rows
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
    """What depth has shown defects in."""
    launch.needs_the_device()
    assert wrong("bert", "random", 4, "all and activations on the host, saved") == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "aliased"])
@pytest.mark.parametrize("axis", families.PARALLEL)
def test_what_ranks_hold_in_parts(axis: str, mode: str) -> None:
    launch.needs_the_device()
    family = "mixtral" if axis == "experts" else "llama"
    assert wrong(family, mode, 2, *families.PARALLEL[axis]) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random:10", "eager", "aliased"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_configuration(family: str, mode: str) -> None:
    launch.needs_the_device()
    assert wrong(family, mode, families.STEPS, seconds=3000) == []
