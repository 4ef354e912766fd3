"""PEFT over models in shards: the numbers, files and merged weights of one plain process."""

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import launched, oracle
from tests.matrix.scripts import peft_cases

SCRIPT = Path(__file__).parent / "scripts" / "peft_cases.py"
MERGED = ("lora", "saved")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    peft_cases.make_base(folder)
    return folder


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    with launched.beside(SCRIPT, out, "--base", str(base)) as report:
        yield out, report


def same_files(got, want):
    """The adapter's tensors, none of them empty."""
    found, wanted = (load_file(each / "adapter_model.safetensors") for each in (got, want))
    assert all(value.numel() for value in found.values())
    oracle.compare_tensors(str(got), found, wanted)


WAYS = {
    "stage 3": (3, {}),
    "stage 2, kernels": (2, {"kernels": "auto"}),
    "stage 3, on cpu, kernels": (
        3,
        {
            "offload_optimizer_device": "cpu",
            "offload_param_device": "cpu",
            "kernels": launched.KEYS["kernels"],
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_loops_for_accelerate(way, base, plain, tmp_path):
    stage, keys = WAYS[way]
    given = (SCRIPT, tmp_path, "--base", str(base))
    reports = launched.accelerate_launch(*given, stage=stage, gradient_clipping=1.0, **keys)
    folder, want = plain[0], plain[1]()
    for rank, got in enumerate(reports):
        assert got["type"] == "DistributedType.DEEPSPEED"
        for case in peft_cases.CASES:
            for part in ("first", "resumed", "again"):
                wanted = pytest.approx(want[case][part], rel=1e-5)
                assert got[case][part] == wanted, (case, part)
        for case in MERGED if not keys else ():
            merged = torch.load(tmp_path / case / f"merged-{rank}.pt")
            oracle.compare_tensors(case, merged, torch.load(folder / case / "merged-0.pt"))
    for case in peft_cases.CASES:
        for part in ("adapter", "again"):
            same_files(tmp_path / case / part, folder / case / part)
    for case in MERGED:
        load = peft.PeftModel.from_pretrained
        loaded = load(peft_cases.base(base), tmp_path / case / "adapter").merge_and_unload()
        wanted = torch.load(folder / case / "merged-0.pt")
        oracle.compare_tensors(f"loaded and merged {case}", loaded.state_dict(), wanted)
