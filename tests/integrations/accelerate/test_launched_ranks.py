"""An unmodified Accelerate script under ``accelerate launch --config`` on two CPU ranks, beside
the same script alone.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from tests.helpers import launched
from tests.helpers.cells import fast

SCRIPT = Path(__file__).parents[1] / "scripts" / "accelerate_loop.py"
STAGES = fast((0, 2, 3), lambda stage: stage == 2)  # 3 is the stage of the launches in tests/matrix


def configuration(stage: int) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": stage,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero3_save_16bit_model": True,
        },
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
    }


class Runs:
    """The script alone with batches of 8, and launched on two ranks with batches of 4; each at
    most once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alone = cache(self._alone)
        self.launched = cache(self._launched)

    def _alone(self) -> dict[str, Any]:
        out = self.folder / "alone"
        command = [launched.python(), str(SCRIPT), "--out", str(out), "--batch_size", "8"]
        launched.output(command, self.folder, self.folder / "alone.log")
        return json.loads((out / "report-0.json").read_text())

    def _launched(self, stage: int) -> list[dict[str, Any]]:
        out = self.out(stage)
        out.mkdir()
        file = self.folder / f"zero{stage}.yaml"
        file.write_text(yaml.safe_dump(configuration(stage)))
        launched.output(
            [
                "accelerate",
                "launch",
                "--config",
                str(file),
                str(SCRIPT),
                "--out",
                str(out),
                "--batch_size",
                "4",
            ],
            self.folder,
            out / "log.txt",
        )
        return [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(2)]

    def out(self, stage: int) -> Path:
        return self.folder / f"stage{stage}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("launches"))


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_know_that_they_are_two(runs: Runs, stage: int) -> None:
    ranks = runs.launched(stage)
    assert [(r["rank"], r["world"], r["main"]) for r in ranks] == [(0, 2, True), (1, 2, False)]
    assert {r["type"] for r in ranks} == {"DistributedType.DEEPSPEED"}
    assert {r["device"] for r in ranks} == {"cpu"}
    assert {r["unwrapped"] for r in ranks} == {"BertForSequenceClassification"}


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_sharded_at_stage_3_alone(runs: Runs, stage: int) -> None:
    assert [r["parameters"] == "ReleasedParameter" for r in runs.launched(stage)] == [
        stage == 3
    ] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_the_curve_is_that_of_one_process(runs: Runs, stage: int) -> None:
    expected = runs.alone()["first"]
    for rank in runs.launched(stage):
        assert len(rank["first"]) == len(expected) == 6
        for name in ("loss", "norm", "lr"):
            ours, theirs = (
                [step[name] for step in history] for history in (rank["first"], expected)
            )
            torch.testing.assert_close(
                torch.tensor(ours),
                torch.tensor(theirs),
                rtol=1e-5,
                atol=1e-7,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("stage", STAGES)
def test_going_back_to_a_saved_state_repeats_the_steps_bit_for_bit(runs: Runs, stage: int) -> None:
    for rank in runs.launched(stage):
        assert rank["again"] == rank["first"][3:]


@pytest.mark.parametrize("stage", STAGES)
def test_the_evaluation_sees_each_sample_once(runs: Runs, stage: int) -> None:
    expected = runs.alone()["evaluation"]
    for rank in runs.launched(stage):
        assert rank["evaluation"]["labels"] == expected["labels"]
        torch.testing.assert_close(
            torch.tensor(rank["evaluation"]["logits"]),
            torch.tensor(expected["logits"]),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_model_loads_with_the_weights_of_one_process(runs: Runs, stage: int) -> None:
    runs.launched(stage)
    runs.alone()
    model, info = BertForSequenceClassification.from_pretrained(
        runs.out(stage) / "model", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = load_file(runs.folder / "alone" / "model" / "model.safetensors")
    weights = dict(model.named_parameters())
    for name, tensor in expected.items():
        if name.endswith("key.bias"):
            continue  # its gradient is zero in theory, and Adam makes a direction of the rounding
        difference = (weights[name].detach() - tensor).norm() / tensor.norm().clamp(min=1e-6)
        assert difference < 1e-5, f"{name}: {difference}"


@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_state_is_sharded(runs: Runs, stage: int) -> None:
    runs.launched(stage)
    state = runs.out(stage) / "state"
    assert (state / "latest").read_text().strip() == "pytorch_model"
    assert len(list((state / "pytorch_model").glob("rank-*-of-00002.safetensors"))) == 2
