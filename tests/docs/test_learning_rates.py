"""The learning rates of pages and recipes that make a schedule, on two ranks: it is as long as the
run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.documents import blocks, of_kind
from tests.helpers import launched

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["hf-zero", "launch", "--ranks", "2"]


def write(folder: Path, page: str) -> None:
    """Write the files that the blocks of ``page`` are."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)


def rates_of(folder: Path) -> list[float]:
    """The learning rate of each step in the one file of metrics below ``folder``."""
    (file,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["learning_rate"] for row in rows if "learning_rate" in row]


def falls_to_zero(rates: list[float], steps: int) -> None:
    """Check that a linear schedule with a warm-up reaches 0 right after the last of ``steps``."""
    assert len(rates) == steps and all(rate > 0 for rate in rates[1:]), rates
    assert rates[-1] == pytest.approx(rates[-2] - rates[-1], rel=1e-4), rates


def test_the_page_on_accelerate(tmp_path: Path) -> None:
    """Accelerate steps a prepared scheduler once a rank."""
    write(tmp_path, "accelerate")
    sets = ["--set", "metrics.enabled=true", "--set", "metrics.path=figures"]
    command = [*LAUNCH, "--preset", "zero3", *sets, "--", "train.py"]
    launched.output(command, tmp_path, tmp_path / "log.txt")
    falls_to_zero(rates_of(tmp_path), 16)


@pytest.mark.long
def test_the_page_on_scripts_for_deepspeed(tmp_path: Path) -> None:
    """The schedule rises from the zeros that DeepSpeed begins with, and stays."""
    write(tmp_path, "deepspeed-scripts")
    file = tmp_path / "ds_config.json"
    metrics = {"enabled": True, "path": "figures"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metrics": metrics}))
    command = [*LAUNCH, "--", "train.py", "--deepspeed_config", file.name]
    launched.output(command, tmp_path, tmp_path / "log.txt")
    rates = rates_of(tmp_path)
    assert len(rates) == 16 and rates == sorted(rates) and rates[2] > 0, rates
    assert rates[4:] == [0.001] * 12


def test_no_other_page_makes_a_schedule() -> None:
    pages = {each.page for each in of_kind("python", "json") if each.title and "sched" in each.text}
    assert pages == {"accelerate", "deepspeed-scripts"}


@pytest.mark.long
def test_recipes_whose_script_makes_a_schedule(tmp_path: Path) -> None:
    """Of those for Accelerate; the Trainer makes its own, and other engines step theirs."""
    scripts = {path.parent.name: path.read_text() for path in ROOT.glob("recipes/*/run_*.py")}
    made = {name for name, text in scripts.items() if "get_scheduler(" in text}
    assert made == {"bert-mlm"}
    words = ["--max_train_steps", "12", "--num_warmup_steps", "3", "--vocab_size", "512"]
    words += ["--num_layers", "1", "--hidden_size", "32", "--output_dir", str(tmp_path / "run")]
    recipe = ROOT / "recipes" / "bert-mlm"
    command = ["accelerate", "launch", "--config_file", "zero3.yaml", "run_mlm.py", *words]
    launched.output(command, recipe, tmp_path / "log.txt")
    falls_to_zero(rates_of(tmp_path), 12)
