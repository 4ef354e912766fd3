"""Scripts that call DeepSpeed's API on two ranks, against the same training in one process."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.cells import fast
from tests.helpers.commands import completed
from tests.helpers.launched import beside, environment, torchrun
from tests.helpers.offloads import offload
from tests.matrix.scripts.deepspeed_api import CASES, COUNT, HALF, config_of

SCRIPT = Path(__file__).with_name("scripts") / "deepspeed_api.py"
RANKS = 2


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The plain run, while the ranks are at work."""
    with beside(SCRIPT, tmp_path_factory.mktemp("plain"), "--ranks", str(RANKS)) as report:
        yield report


def close(got, expected):
    """Relative in norm to 1e-5."""
    a, b = (torch.tensor(numbers, dtype=torch.float64).flatten() for numbers in (got, expected))
    return a.shape == b.shape and float((a - b).norm()) <= 1e-5 * float(b.norm())


def compare(name, reports, expected):
    """Numbers, and the shares of the global batches that the ranks have read."""
    case = CASES[name]
    assert len(expected["norms"]) == case.steps
    for rank, got in enumerate(reports):
        for figure in ("losses", "norms", "rates"):
            assert close(got[figure], expected[figure]), (name, rank, figure, got[figure])
        assert got["weights"].keys() == expected["weights"].keys()
        for key, weight in expected["weights"].items():
            assert close(got["weights"][key], weight), (name, rank, key)
    parts = zip(*(got["places"] for got in reports))
    for shares, whole in zip(parts, expected["places"], strict=True):
        assert [len(share) for share in shares] == [case.means[0]] * RANKS
        assert sorted(place for share in shares for place in share) == sorted(whole)


@pytest.mark.parametrize(
    "stage, away",
    fast([(2, "optimizer in files"), (0, ""), (3, "all on cpu")], lambda stage, away: stage == 2),
)
def test_the_numbers_are_those_of_a_plain_run(stage, away, started, tmp_path):
    config, zero = tmp_path / "ds_config.json", {"stage": stage}
    if away:
        zero = offload(away, stage, tmp_path)
    config.write_text(json.dumps(config_of(CASES["file"], zero)))
    given = ("--deepspeed", "--deepspeed_config", str(config))
    reports, plain = torchrun(SCRIPT, tmp_path, *given, ranks=RANKS), started()
    for name in CASES:
        compare(name, [report[name] for report in reports], plain[name])
    for name in ("file", "total"):  # whether epochs differ is what the script says
        places, epoch = reports[0][name]["places"], COUNT // (CASES[name].means[0] * RANKS)
        first, second = places[:epoch][: len(places) - epoch], places[epoch:]
        assert second and (first != second) is CASES[name].set_epoch
    for report in reports:
        assert report["endless"] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
    the_script_in_the_folder_gives_whole_weights(tmp_path, plain["resumed"]["weights"])


def the_script_in_the_folder_gives_whole_weights(out, want):
    folder, model = out / "checkpoints", out / "model"
    assert (folder / "latest").read_text() == "final" and (folder / f"global_step{HALF}").is_dir()
    command = [sys.executable, "zero_to_fp32.py", ".", str(model)]
    completed(command, cwd=folder, env=environment(), check=True, timeout=300)
    weights = load_file(model / "model.safetensors")
    assert weights.keys() == want.keys()
    for name, weight in want.items():
        assert weights[name].dtype == torch.float32 and close(weights[name].tolist(), weight), name
