"""Every recipe: its card and presets can be read, its script knows nothing of hf-zero, and the literal command runs it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import hf_zero
from hf_zero.config import PRESETS, ZeroConfig

ROOT = Path(__file__).resolve().parents[2]
# Those without presets are started by a library's own launcher, and have tests of their own beside that library's.
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/README.md") if any(path.parent.glob("zero3.*")))
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


def script_of(recipe: Path) -> Path:
    (script,) = recipe.glob("run_*.py")
    return script


def launch(recipe: Path, preset: str, output: Path, *arguments: str, limit: float = 240) -> dict[str, Any]:
    """Run ``accelerate launch --config PRESET SCRIPT`` inside the recipe; return what its last checkpoint knows of the run."""
    accelerate = shutil.which("accelerate", path=os.path.dirname(sys.executable))
    assert accelerate is not None
    command = [accelerate, "launch", "--config", preset, script_of(recipe).name, "--output_dir", str(output), *arguments]
    with open(output.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen(command, cwd=recipe, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        assert code == 0, f"ended with {code} (None: after {limit} s)\n{log.read()[-4000:]}"
    last = max(output.glob("step_*/trainer_state.json"), key=lambda path: int(path.parent.name.removeprefix("step_")))
    return {**json.loads(last.read_text()), "folder": last.parent}


def test_there_are_recipes() -> None:
    assert "bert-mlm" in [recipe.name for recipe in RECIPES]


@every_recipe
def test_the_card_has_front_matter(recipe: Path) -> None:
    card = ModelCard.load(recipe / "README.md")
    assert card.data.language and card.data.license and card.data.pipeline_tag
    assert "hf-zero" in card.data.tags


@every_recipe
def test_presets_are_the_four_stages_on_two_cpu_ranks(recipe: Path) -> None:
    for name, stage in PRESETS.items():
        config = ZeroConfig.from_file(recipe / f"{name}.yaml", allow_auto=True)
        assert (config.stage, config.precision, config.gradient_clipping) == (stage, "fp32", 1.0)
        assert (config.launch.num_processes, config.launch.use_cpu) == (2, True)


@every_recipe
def test_the_script_does_not_know_hf_zero(recipe: Path) -> None:
    imported = [node for node in ast.walk(ast.parse(script_of(recipe).read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name.split(".")[0] for node in imported if isinstance(node, ast.Import) for alias in node.names}
    names |= {(node.module or "").split(".")[0] for node in imported if isinstance(node, ast.ImportFrom)}
    assert {"accelerate", "transformers"} <= names
    assert not names & {"hf_zero", "deepspeed"}


@every_recipe
def test_two_steps_and_a_converted_model(recipe: Path, tmp_path: Path) -> None:
    run = launch(recipe, "zero3.yaml", tmp_path / "run", "--max_train_steps", "2")
    assert (run["completed_steps"], run["processes"], run["sharding"]) == (2, 2, "ZeRO stage 3")
    before, *_, after = (entry["eval_loss"] for entry in run["log_history"] if "eval_loss" in entry)
    assert after < before

    done = hf_zero.convert_checkpoint(run["folder"], tmp_path / "model", progress=False)
    assert done.parameters == run["parameters"]
    card = ModelCard.load(done.folder / "README.md")
    assert card.data.pipeline_tag and "| 2 |" in card.text.partition("## This run")[2]

    predicted = hf_zero.estimate(done.folder, ranks=2, precision="fp32").at(3)
    for rank in run["memory"]:
        assert predicted.state <= rank["state"] <= 1.02 * (predicted.state + predicted.gradient_buffers)

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model, tokenizer = AutoModelForMaskedLM.from_pretrained(done.folder), AutoTokenizer.from_pretrained(done.folder)
    assert model(**tokenizer("The value of [MASK] expression.", return_tensors="pt")).logits.shape[-1] == len(tokenizer)


@pytest.mark.long
@every_recipe
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(recipe: Path, tmp_path: Path) -> None:
    # 150 steps of accumulation 2 are several passes over the text: the resumed run starts inside one and ends in another.
    steps = ("--max_train_steps", "150", "--checkpointing_steps", "60", "--logging_steps", "1", "--gradient_accumulation_steps", "2")
    whole = launch(recipe, "zero3.yaml", tmp_path / "whole", *steps)
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole" / "step_60", tmp_path / "resumed" / "step_60")
    (tmp_path / "resumed" / "step_120").mkdir()  # torn: it lacks the file that is written last
    resumed = launch(recipe, "zero3.yaml", tmp_path / "resumed", *steps, "--resume_from_checkpoint", "latest")
    assert len(whole["log_history"]) == 152
    assert resumed["log_history"] == whole["log_history"]


@pytest.mark.long
@every_recipe
def test_all_stages_train_alike(recipe: Path, tmp_path: Path) -> None:
    losses = {}
    for name in PRESETS:
        run = launch(recipe, f"{name}.yaml", tmp_path / name, "--max_train_steps", "30")
        losses[name] = [entry.get("loss", entry.get("eval_loss")) for entry in run["log_history"]]
    for name, curve in losses.items():
        assert curve == pytest.approx(losses["zero0"], rel=1e-5), name
