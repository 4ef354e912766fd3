"""The model card that the Trainer and TRL write: with the run, as that of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_zero.checkpoint import convert_checkpoint
from hf_zero.logging import curve
from tests.helpers.trainers import STEPS, routed

BEGIN = "<!-- hf-zero: run -->"


def table(folder: Path) -> str:
    _, begin, rest = (folder / "README.md").read_text().partition(BEGIN)
    assert begin
    return rest


def on(folder: Path) -> dict[str, Any]:
    return {"metrics": {"enabled": True, "path": str(folder)}}


@pytest.mark.parametrize("stage, path", [(1, "run"), (3, "figures")])
def test_the_card_is_that_of_a_conversion(stage: int, path: str, tmp_path: Path) -> None:
    """Rows and evaluations, with the figures in output_dir, or elsewhere."""
    folder, figures = tmp_path / "run", tmp_path / path
    saves = {
        "save_strategy": "steps",
        "save_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
    }
    run = routed("stock", stage, folder, "llama", config=on(figures), **saves)
    run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    for _ in range(2):  # in place of the table of the first
        run.create_model_card(dataset_tags="org/data", model_name="small")
        shown = table(folder)
        assert shown.count("| data | org/data |") == 1
        assert f"| training loss, steps 1 to {STEPS} | {losses[0]:.4g} {curve(losses)} " in shown
        assert "| parameters (trained) |" in shown and f"| {stage}, 1, fp32 |" in shown
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type) == ("org/data", "loss")
    convert_checkpoint(folder / f"checkpoint-{STEPS}", tmp_path / "out")
    if path == "run":  # a conversion looks beside the checkpoint
        assert table(tmp_path / "out") == shown
    run.deepspeed.destroy()
