"""The recipe of pre-LN BERT: it learns at a learning rate at which the same model, post-LN, does
not.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_zero.config import ZeroConfig
from tests.helpers import launched

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pre-layer-norm-bert"
UNKNOWING = math.log(32)  # the loss of a guess among all words


def last_loss(preset: str, output: Path, *arguments: str) -> float:
    command = [
        "torchrun",
        "--nproc_per_node",
        "2",
        "run_pre_layer_norm.py",
        "--deepspeed_config",
        preset,
        "--checkpoint_dir",
        str(output),
    ]
    launched.output([*command, *arguments], RECIPE, output.with_suffix(".log"))
    (state,) = output.glob("iter_*/trainer_state.json")
    return float(json.loads(state.read_text())["log_history"][-1]["loss"])


def test_the_files_are_a_recipe() -> None:
    card = ModelCard.load(RECIPE / "README.md")
    assert "hf-zero" in card.data.tags and all(
        f"## {heading}" in card.text for heading in ("Training", "Evaluation", "Limits")
    )
    imported = {
        node.names[0].name
        for node in ast.walk(ast.parse((RECIPE / "run_pre_layer_norm.py").read_text()))
        if isinstance(node, ast.Import)
    }
    assert "hf_zero" not in imported
    pre, post = (
        ZeroConfig.from_file(RECIPE / f"{name}.json").to_dict() for name in ("pre", "post")
    )
    assert pre.pop("pre_layer_norm") is True and post.pop("pre_layer_norm") is False and pre == post


@pytest.mark.long
def test_two_steps_of_each(tmp_path: Path) -> None:
    for preset in ("pre.json", "post.json"):
        assert (
            3
            < last_loss(preset, tmp_path / preset.removesuffix(".json"), "--num_iterations", "2")
            < 5
        )


@pytest.mark.long
def test_pre_ln_learns_where_post_ln_does_not(tmp_path: Path) -> None:
    assert last_loss("post.json", tmp_path / "post") > 0.98 * UNKNOWING
    assert last_loss("pre.json", tmp_path / "pre") < 0.75 * UNKNOWING
