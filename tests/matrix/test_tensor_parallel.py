"""``tensor_parallel.autotp_size`` through a stock Trainer and loops of Accelerate, on processes,
beside the same lines in one process; and their loaders, where each rank reads what its
data-parallel rank reads in the same run without tensor and sequence parallelism.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.launched import beside, torchrun
from tests.helpers.models import seeded
from tests.helpers.tensor_parallel import llama

SCRIPT = Path(__file__).parent / "scripts" / "tensor_parallel_cases.py"
LOADERS = SCRIPT.with_name("shared_loaders.py")
APART = "shuffled by ranks that are seeded apart"


def nearly(got, want, where=""):
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            nearly(got[key], want[key], f"{where} {key}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for one, other in zip(got, want):
            nearly(one, other, where)
    else:
        assert got == (want if isinstance(want, str) else pytest.approx(want, rel=2e-5)), where


def compare(out, ranks, stages):
    seeded(llama).save_pretrained(out / "start")
    chosen = ["--model", str(out / "start"), "--stages", *map(str, stages)]
    with beside(SCRIPT, out / "alone") as alone:
        reports = torchrun(SCRIPT, out / "ranks", *chosen, ranks=ranks, timeout=400)
        want = alone()
    files = load_file(out / "alone" / "trainer-None" / "saved" / "model.safetensors")
    for stage in stages:
        for case in ("trainer", "twice", "loop", "experts_twice"):
            nearly(reports[0][f"{case} {stage}"], want[f"{case} None"], f"{case} {stage}")
        saved = load_file(out / "ranks" / f"trainer-{stage}" / "saved" / "model.safetensors")
        assert saved.keys() == files.keys()
        for name, value in files.items():
            assert saved[name].shape == value.shape, name
            assert (saved[name] - value).norm() <= 1e-4 * value.norm(), name


def test_two_ranks_share_the_layers(tmp_path):
    compare(tmp_path, 2, (3,))


@pytest.mark.long
def test_two_groups_of_two(tmp_path):
    compare(tmp_path, 4, (1, 3))


def test_two_ranks_read_as_one_process(tmp_path):
    with beside(LOADERS, tmp_path / "alone") as alone:
        first, second = torchrun(LOADERS, tmp_path / "two", "--tensor", "2")
        want = alone()
    assert first[APART]["read"] == second[APART]["read"]
    del want[APART], first[APART], second[APART]  # by seeds that are drawn
    assert first == second == want
