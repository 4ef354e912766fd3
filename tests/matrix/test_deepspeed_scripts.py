"""Scripts that call DeepSpeed's API on two ranks, against the same on the reference engine."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler

from tests.helpers.cells import fast
from tests.helpers.commands import completed
from tests.helpers.launched import environment, torchrun
from tests.helpers.offloads import offload
from tests.matrix.scripts.deepspeed_api import CASES, COUNT, HALF, config_of

SCRIPT = Path(__file__).with_name("scripts") / "deepspeed_api.py"
RANKS = 2


def launched(out, zero, *more):
    config = out / "ds_config.json"
    config.write_text(json.dumps(config_of(CASES["file"], zero)))
    given = ("--deepspeed", "--deepspeed_config", str(config), *more)
    return torchrun(SCRIPT, out, *given, ranks=RANKS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("plain"), {"stage": 0}, "--reference")


def close(got, expected):
    """Relative in norm to 1e-5."""
    a, b = (torch.tensor(numbers, dtype=torch.float64).flatten() for numbers in (got, expected))
    return a.shape == b.shape and float((a - b).norm()) <= 1e-5 * float(b.norm())


def batches(case):
    """The rows of the micro-batches of all ranks together, as torch's sampler draws them."""
    sampler, size = DistributedSampler(range(COUNT), 1, 0), case.means[0] * RANKS
    for epoch in itertools.count():
        sampler.set_epoch(epoch if case.set_epoch else 0)
        rows = list(sampler)
        yield from (rows[at : at + size] for at in range(0, COUNT, size))


def compare(name, reports, plain):
    """Numbers, and the shares of the global batches that the ranks have read."""
    case = CASES[name]
    for rank, (got, expected) in enumerate(zip(reports, plain, strict=True)):
        assert len(expected["norms"]) == case.steps
        for figure in ("losses", "norms", "rates"):
            assert close(got[figure], expected[figure]), (name, rank, figure, got[figure])
        assert got["weights"].keys() == expected["weights"].keys()
        for key, weight in expected["weights"].items():
            assert close(got["weights"][key], weight), (name, rank, key)
    parts = zip(*(got["places"] for got in reports), strict=True)
    for shares, whole in zip(parts, batches(case)):
        assert [len(share) for share in shares] == [case.means[0]] * RANKS
        assert sorted(place for share in shares for place in share) == sorted(whole)


@pytest.mark.parametrize(
    "stage, away",
    fast([(2, "optimizer in files"), (0, ""), (3, "all on cpu")], lambda stage, away: stage == 2),
)
def test_the_numbers_are_those_of_the_reference(stage, away, plain, tmp_path):
    reports = launched(tmp_path, offload(away, stage, tmp_path) if away else {"stage": stage})
    for name in CASES:
        compare(name, *([report[name] for report in of] for of in (reports, plain)))
    for name in ("file", "total"):  # whether epochs differ is what the script says
        places, epoch = reports[0][name]["places"], COUNT // (CASES[name].means[0] * RANKS)
        first, second = places[:epoch][: len(places) - epoch], places[epoch:]
        assert second and (first != second) is CASES[name].set_epoch
    for report in reports:
        assert report["endless"] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
    the_script_in_the_folder_gives_whole_weights(tmp_path, plain[0]["resumed"]["weights"])


def the_script_in_the_folder_gives_whole_weights(out, want):
    folder, model = out / "checkpoints", out / "model"
    assert (folder / "latest").read_text() == "final" and (folder / f"global_step{HALF}").is_dir()
    command = [sys.executable, "zero_to_fp32.py", ".", str(model)]
    completed(command, cwd=folder, env=environment(), check=True, timeout=300)
    weights = load_file(model / "model.safetensors")
    assert weights.keys() == want.keys()
    for name, weight in want.items():
        assert weights[name].dtype == torch.float32 and close(weights[name].tolist(), weight), name
