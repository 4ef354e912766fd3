"""Damaged files of every kind that hf-zero reads: each is read or refused with an error of hf-zero,
and nothing is written outside the folder that was named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import KINDS, fuzz
from tests.helpers.cells import fast

OFTEN = {"configuration": 30, "hostfile": 100}
SLICES = [
    (kind, seeds) for kind in KINDS for seeds in (range(OFTEN.get(kind, 12)), range(100, 600))
]


@pytest.mark.parametrize(
    ("kind", "seeds"), fast(SLICES, lambda kind, seeds: not seeds.start), ids=str
)
def test_damaged_files_are_read_or_refused(kind: str, seeds: range, tmp_path: Path) -> None:
    for seed, error in fuzz(kind, seeds, tmp_path):
        raise AssertionError(f"python -m tests.fuzz.targets {kind} {seed} {seed + 1}") from error
