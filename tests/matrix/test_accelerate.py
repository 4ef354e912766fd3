"""Accelerate loops on two CPU ranks, beside the same lines plainly in one process."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.launched import KEYS, accelerate_launch, beside

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_cases.py"
CASES = ("uneven", "resumed", "fitted")
ON_CPU = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
IN_FILES = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "."}
WAYS = {
    "stage 3, all on cpu": (3, ON_CPU),
    "stage 2, optimizer in files": (2, IN_FILES),
    "stage 3, kernels": (3, KEYS),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    with beside(SCRIPT, out, "--cases", *CASES) as report:
        yield out, report


def numbers(found):
    return [*found["losses"], *(number for step in found.get("steps", ()) for number in step)]


def compare(report, want, case):
    found, wanted = report[case], want[case]
    assert found["type"].endswith("DEEPSPEED") and wanted["type"].endswith("NO")
    assert len(numbers(wanted)) > 6
    assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-5), case
    for key in ("tried", "guesses"):
        assert found.get(key) == wanted.get(key), case


@pytest.mark.parametrize("way", fast(WAYS, lambda way: way == "stage 3, all on cpu"))
def test_loops_train_as_in_one_process(way, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_LOG_LEVEL", "INFO")
    stage, keys = WAYS[way]
    steps = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 3}
    reports = accelerate_launch(SCRIPT, tmp_path, "--cases", *CASES, stage=stage, **steps, **keys)
    (folder, report), place = plain, tmp_path / "uneven"
    for found in reports:
        for case in CASES:
            compare(found, report(), case)
    assert report()["fitted"]["tried"] == [32, 16, 8] and len(report()["uneven"]["guesses"]) == 21
    want = torch.load(folder / "uneven" / "whole.pt")
    for state in (
        torch.load(place / "whole.pt"),
        load_file(place / "safe" / "model.safetensors"),
        transformers.AutoModelForCausalLM.from_pretrained(place / "pretrained").state_dict(),
    ):
        oracle.compare_tensors("weights", state, want, floor=oracle.ADAM_ROUNDING)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    tables = sum("fused kernels in LlamaForCausalLM" in line for line in lines)
    engines = sum("resolved configuration" in line for line in lines)
    assert engines > 5 and tables == (engines if "kernels" in way else 0)
