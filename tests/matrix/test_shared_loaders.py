"""Loaders of Accelerate and the Trainer where ranks share layers or sequences: each reads what its
data-parallel rank reads in the same run without them.
"""

from pathlib import Path

from tests.helpers.launched import beside, torchrun

APART = "shuffled by ranks that are seeded apart"
SCRIPT = Path(__file__).parent / "scripts" / "shared_loaders.py"


def test_ranks_read_as_their_data_parallel_rank(tmp_path):
    """Two groups of two ranks as two ranks, and a group of four or two as one process."""
    meshes = ("--meshes", "2x1", "1x2", "2x2")
    with beside(SCRIPT, tmp_path / "alone") as alone:
        of_four = torchrun(SCRIPT, tmp_path / "four", *meshes, ranks=4)
        of_two = torchrun(SCRIPT, tmp_path / "two", "--meshes", "1x1", "2x1", ranks=2)
        want = alone()["1x1"]
    for rank, report in enumerate(of_four):
        _same(report["2x1"], of_two[rank // 2]["1x1"])
        _same(report["1x2"], of_two[rank // 2]["1x1"])
        _same(report["2x2"], want)
    for report in of_two:
        _same(report["2x1"], want)
    for mesh in ("2x1", "1x2", "2x2"):
        first, second, third, fourth = (report[mesh][APART]["read"] for report in of_four)
        assert first == second and third == fourth
        assert {sample for batch in first + third for sample in batch} == {*range(19)}
    first, second = (report["2x1"][APART]["read"] for report in of_two)
    assert first == second


def _same(found, want):
    """Assert that both have the same values. None is skipped: the counts of metrics are left out
    where ranks have parts of sequences.
    """
    assert found.keys() == want.keys()
    for name, row in found.items():
        if name == APART:  # by seeds that are drawn
            continue
        for key, value in row.items():
            assert value is None or value == want[name][key], (name, key)
