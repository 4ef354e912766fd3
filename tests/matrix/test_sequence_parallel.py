"""Trainers on two ranks that share sequences, against the same script in one process."""

from pathlib import Path

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.launched import beside, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "sequence_cases.py"


WAYS = {
    "heads": ((), 2),
    "a ring": (("--ring",), 2),
    "rings of ranks that exchange heads": (("--ring", "--heads", "2"), 4),
}


@pytest.mark.parametrize("way", fast(WAYS, "heads".__eq__))
def test_the_trainer(way, tmp_path):
    flags, ranks = WAYS[way]
    with beside(SCRIPT, tmp_path / "plain") as plain:
        found = torchrun(SCRIPT, tmp_path / "split", "--stage", "3", *flags, ranks=ranks)
        expected = plain()
    want = torch.load(tmp_path / "plain" / "weights-0.pt")
    for rank, report in enumerate(found):
        for entry, plainly in zip(report["log"], expected["log"], strict=True):
            assert entry == pytest.approx(plainly, rel=1e-5)
        assert (report["stage"], report["batch"], report["total"]) == (3, 4, 4)
        weights = torch.load(tmp_path / "split" / f"weights-{rank}.pt")
        oracle.compare_tensors("weights", weights, want, 1e-5, 1e-6)
