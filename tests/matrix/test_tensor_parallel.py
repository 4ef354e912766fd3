"""``tensor_parallel.autotp_size`` through a stock Trainer and a loop of Accelerate, on processes,
beside the same lines in one process.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.launched import beside, torchrun
from tests.helpers.models import seeded
from tests.helpers.tensor_parallel import llama

CASE = ("--cases", "sequences")
SCRIPT = Path(__file__).parent / "scripts" / "tensor_parallel_cases.py"


def _compare(out, ranks, stages):
    seeded(llama).save_pretrained(out / "start")
    chosen = ["--model", str(out / "start"), "--stages", *map(str, stages)]
    with beside(SCRIPT, out / "alone") as alone:
        reports = torchrun(SCRIPT, out / "ranks", *chosen, ranks=ranks, timeout=400)
        want = alone()
    files = load_file(out / "alone" / "trainer-None" / "saved" / "model.safetensors")
    for stage in stages:
        got = [report[f"trainer {stage}"] for report in reports]
        for key in ("log", "eval_loss", "total", "predicted", "labels"):
            _nearly(got[0][key], want["trainer None"][key])
        saved = load_file(out / "ranks" / f"trainer-{stage}" / "saved" / "model.safetensors")
        assert {name: value.shape for name, value in saved.items()} == {
            name: value.shape for name, value in files.items()
        }
        for name, value in files.items():
            assert (saved[name] - value).norm() <= 1e-4 * value.norm(), name
        got = [report[f"accelerate {stage}"] for report in reports]
        for key in ("losses", "rates", "sizes", "seen", "named"):
            _nearly(got[0][key], want["accelerate None"][key])


def _nearly(got, want):
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            _nearly(got[key], want[key])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            _nearly(one, other)
    elif isinstance(want, str):
        assert got == want
    else:
        assert got == pytest.approx(want, rel=2e-5)


def test_two_ranks_share_the_layers(tmp_path):
    _compare(tmp_path, 2, (1, 3))


@pytest.mark.long
def test_two_groups_of_two(tmp_path):
    _compare(tmp_path, 4, (2, 3))


def test_two_ranks_share_the_layers_and_two_the_sequences(tmp_path):
    with beside(SCRIPT, tmp_path / "alone", *CASE) as alone:
        reports = torchrun(SCRIPT, tmp_path / "ranks", *CASE, "--stages", "2", ranks=4, timeout=400)
        _nearly(reports[0]["sequences 2"], alone()["sequences None"])
