"""Scripts that call DeepSpeed's API, on two ranks, against the same training done plainly in one
process.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.commands import completed
from tests.helpers.launched import beside, environment, torchrun
from tests.helpers.offloads import offload
from tests.matrix.scripts.deepspeed_api import CASES, HALF, config_of

SCRIPT = Path(__file__).with_name("scripts") / "deepspeed_api.py"
RANKS = 2

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The plain run, while the ranks are at work."""
    with beside(SCRIPT, tmp_path_factory.mktemp("plain"), "--ranks", str(RANKS)) as report:
        yield report


@pytest.fixture(scope="module")
def plain(run, started):
    return started()


WAYS = [
    pytest.param((0, ""), marks=pytest.mark.long),
    pytest.param((1, ""), marks=pytest.mark.long),
    pytest.param((2, ""), marks=pytest.mark.long),
    pytest.param((3, ""), marks=pytest.mark.long),
    pytest.param((3, "all on cpu"), marks=pytest.mark.long),
    (2, "optimizer in files"),
]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"stage{way[0]} {way[1]}".strip())
def run(request, started, tmp_path_factory):
    stage, away = request.param
    folder = tmp_path_factory.mktemp(f"stage{stage}")
    config = folder / "ds_config.json"
    zero = offload(away, stage, folder) if away else {"stage": stage}
    config.write_text(json.dumps(config_of(CASES["file"], zero, named_optimizer=True)))
    return torchrun(
        SCRIPT, folder, "--deepspeed", "--deepspeed_config", str(config), ranks=RANKS
    ), folder


def close(got, expected):
    """Relative in norm to 1e-5."""
    a, b = (torch.tensor(numbers, dtype=torch.float64).flatten() for numbers in (got, expected))
    return a.shape == b.shape and float((a - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_a_plain_run(case, run, plain):
    expected = plain[case]
    for rank, report in enumerate(run[0]):
        got = report[case]
        assert len(expected["norms"]) == CASES[case].steps
        for figure in ("losses", "norms", "rates"):
            assert close(got[figure], expected[figure]), (
                rank,
                figure,
                got[figure],
                expected[figure],
            )
        assert got["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert close(got["weights"][name], weight), (rank, name)


@pytest.mark.parametrize("case", CASES)
def test_ranks_read_their_shares_of_the_global_batches(case, run, plain):
    micro = CASES[case].means[0]
    for shares, whole in zip(
        zip(*(report[case]["places"] for report in run[0])), plain[case]["places"], strict=True
    ):
        assert [len(share) for share in shares] == [micro] * RANKS
        assert sorted(place for share in shares for place in share) == sorted(whole)


def test_epochs_differ_where_the_script_says_so(run):
    for name in ("file", "total"):
        places, epoch = (
            run[0][0][name]["places"],
            CASES[name].rows // (CASES[name].means[0] * RANKS),
        )
        first, second = places[:epoch][: len(places) - epoch], places[epoch:]
        assert second and (first != second) is CASES[name].set_epoch


def test_an_endless_loader(run):
    for report in run[0]:
        assert report["endless"] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]


def test_the_script_in_the_checkpoint_folder_gives_whole_weights(run, plain, tmp_path):
    folder = run[1] / "checkpoints"
    assert (folder / "latest").read_text() == "final" and (folder / f"global_step{HALF}").is_dir()
    command = [sys.executable, "zero_to_fp32.py", ".", str(tmp_path / "model")]
    completed(command, cwd=folder, env=environment(), check=True, timeout=300)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights.keys() == plain["resumed"]["weights"].keys()
    for name, weight in plain["resumed"]["weights"].items():
        assert weights[name].dtype == torch.float32 and close(weights[name].tolist(), weight), name
