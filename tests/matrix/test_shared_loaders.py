"""Loaders of Accelerate and the Trainer where ranks share layers: each reads what its data-parallel
rank reads in the same run without them.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.launched import beside, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "shared_loaders.py"


def test_ranks_read_as_their_data_parallel_rank(tmp_path: Path) -> None:
    """Two groups of two ranks as two ranks, and a group of four or two as one process."""
    with beside(SCRIPT, tmp_path / "alone") as alone:
        of_four = torchrun(SCRIPT, tmp_path / "four", "--tensor", "2", "4", ranks=4)
        of_two = torchrun(SCRIPT, tmp_path / "two", "--tensor", "1", "2", ranks=2)
        want = alone()["1"]
    for rank, report in enumerate(of_four):
        assert report["2"] == of_two[rank // 2]["1"]
        assert report["4"] == want
    assert [report["2"] for report in of_two] == [want, want]
