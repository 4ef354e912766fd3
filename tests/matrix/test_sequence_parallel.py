"""Trainers on two ranks that share sequences, against the same script in one process."""

from pathlib import Path

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.launched import beside, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "sequence_cases.py"


def check(folder, *cases, flags=(), ranks=2):
    """The reports of the ranks, started with ``flags``."""
    with beside(SCRIPT, folder / "plain", "--cases", *cases) as plain:
        found = torchrun(
            SCRIPT, folder / "split", "--cases", *cases, "--stage", "3", *flags, ranks=ranks
        )
        expected = plain()
    for report in found:
        for case in cases:
            for entry, plainly in zip(report[case]["log"], expected[case]["log"], strict=True):
                assert entry == pytest.approx(plainly, rel=1e-5)
    return found


WAYS = {
    "heads": ((), 2),
    "a ring": (("--ring",), 2),
    "rings of ranks that exchange heads": (("--ring", "--heads", "2"), 4),
}


@pytest.mark.parametrize("way", fast(WAYS, "heads".__eq__))
def test_the_trainer(way, tmp_path):
    (flags, ranks), plain = WAYS[way], tmp_path / "plain" / "weights-0.pt"
    for rank, report in enumerate(check(tmp_path, "trainer", flags=flags, ranks=ranks)):
        found = report["trainer"]
        assert (found["stage"], found["batch"], found["total"]) == (3, 4, 4)
        weights = torch.load(tmp_path / "split" / f"weights-{rank}.pt")
        oracle.compare_tensors("weights", weights, torch.load(plain), 1e-5, 1e-6)


@pytest.mark.long
def test_supervised_fine_tuning_by_trl(tmp_path):
    """Plain rows, and packed ones, whose documents do not see each other."""
    check(tmp_path, "sft", "packed")


@pytest.mark.long
def test_supervised_fine_tuning_by_trl_in_a_ring(tmp_path):
    """TRL refuses to pack beside ``cp_size``."""
    check(tmp_path, "sft", flags=("--ring",))
