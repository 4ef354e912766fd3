"""``hf-zero train`` on two CPU ranks, against its own script in this process, without an engine: on
the data and the model that the recipes generate.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from hf_zero.config.training_file import read_training_file
from hf_zero.launch.training_script import training_script
from tests.helpers import launched
from tests.helpers.cells import in_turn
from tests.helpers.trainers import distance
from tests.integrations.test_recipes import RECIPES

STEPS, ROWS, RANKS = 4, 96, 2
# 16 rows to evaluate on are a batch of 8 on each rank: no rank repeats rows to fill one
RECIPE_OF = {"sft": "sft-lora", "dpo": "dpo", "pretrain": "continued-pretraining"}
FILES: dict[str, dict[str, Any]] = {
    "sft": {"adapters": "lora", "preset": "zero3", "lora_dropout": 0, "max_length": 192},
    "dpo": {"preset": "zero2", "max_length": 160, "eval_fraction": 16 / ROWS, "eval_steps": 2},
    "pretrain": {"preset": "zero1", "weights": "random", "max_length": 128, "seed": 7},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes' model, and a file of rows for each task."""
    folder = tmp_path_factory.mktemp("material")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        import starting

        model, tokenizer = starting.load_causal(None)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        for task, recipe in RECIPE_OF.items():
            (script,) = (RECIPES / recipe).glob("run_*.py")
            names = runpy.run_path(str(script))
            make = {"sft": "answers", "dpo": "preferences", "pretrain": "texts"}[task]
            lines = [json.dumps(row) for row in names[make]()[:ROWS]]
            (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def history(folder: Path) -> list[dict[str, float]]:
    """Losses and gradient norms of each step, and evaluations."""
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    found = [{name: row[name] for name in names if name in row} for row in state["log_history"]]
    return [row for row in found if len(row) > 1]


@in_turn("task", ["sft"], ["dpo", "pretrain"])
def test_a_file_trains_as_its_script_without_an_engine(
    task: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "task": task, "model": str(material / "model"), "dataset": str(material / f"{task}.jsonl"),
        "precision": "fp32", "ranks": RANKS, "max_steps": STEPS, "learning_rate": 1e-3,
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": STEPS,
        "gradient_checkpointing": False, **FILES[task],
    }  # fmt: skip
    file, plain = tmp_path / "train.yaml", tmp_path / "plain.yaml"
    file.write_text(yaml.safe_dump(keys | {"output_dir": "run"}))
    launched.output(["hf-zero", "train", str(file)], tmp_path, tmp_path / "log.txt", 400)
    if task == "sft":
        words = ["hf-zero", "parity", "--steps", "2", str(file)]
        said = launched.output(words, tmp_path, tmp_path / "log.txt", 400)
        assert "equal to torch for 2 steps on 2 ranks" in said
    figures = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert max(row.get("step", 0) for row in figures) == STEPS
    # TRL writes its card with each checkpoint
    assert f"| training loss, steps 1 to {STEPS} |" in (tmp_path / "run/README.md").read_text()

    whole = {"ranks": 1, "per_device_train_batch_size": 2 * RANKS, "output_dir": "plain"}
    plain.write_text(yaml.safe_dump(keys | whole))
    script = tmp_path / "plain.py"
    script.write_text(training_script(read_training_file(plain)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runpy.run_path(str(script), run_name="__main__")

    expected, found = history(Path("plain")), history(Path("run"))
    assert len(expected) == STEPS + (2 if task == "dpo" else 0)
    assert [{**row} for row in found] == [pytest.approx(row, rel=1e-5) for row in expected]
    (weights,) = Path("plain").glob("*model.safetensors")
    before, after = load_file(weights), load_file(Path("run") / weights.name)
    assert before.keys() == after.keys()
    assert distance(before, after) <= 1e-5 * distance(before)
    shutil.rmtree("run")
