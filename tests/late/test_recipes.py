"""The recipes on two ranks of the simulated device, which poses as CUDA: no report; without
dropout, the losses of CPU ranks.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import launched
from tests.late import launch

RECIPES = launch.ROOT / "recipes"
TORCHRUN = ("torchrun", "--nproc_per_node", "2")
CLOSE = 2e-5  # relative, of losses in fp32


@dataclass(frozen=True)
class Recipe:
    """The words that start it for a few steps, up to its folder; ``history`` is the file below
    it that has its losses, if one has.
    """

    command: tuple[str, ...]
    more: dict[str, str]  # of the environment
    history: str = "*/trainer_state.json"


INTERPRETED = {"TRITON_INTERPRET": "1"}
TINY = ("--vocab_size", "512", "--num_layers", "2")

FOUND = {
    "bert-mlm": Recipe(
        (
            "accelerate", "launch", "--config", "zero3.yaml", "run_mlm.py", *TINY, "--hidden_size",
            "32", "--max_train_steps", "2",
            "--logging_steps", "1", "--validation_fraction", "0.005", "--output_dir",
        ),
        {},
    ),
    "cifar10": Recipe(
        (
            *TORCHRUN, "run_cifar10.py", "--deepspeed_config", "zero3.json", "--train_images",
            "256", "--eval_images", "64",
            "--max_train_steps", "2", "--logging_steps", "1", "--output_dir",
        ),
        {},
    ),
    "gpt2": Recipe(
        (*TORCHRUN, "run_gpt2.py", "--deepspeed_config", "zero3.json", *TINY, "--train_iters", "2",
        "--log_interval", "1", "--save"), {}
    ),
    "hello-bert": Recipe(
        (
            *TORCHRUN, "run_hello_bert.py", "--deepspeed_config", "zero3.json", *TINY, "--h_dim",
            "32", "--num_iterations", "2",
            "--log_every", "1", "--checkpoint_dir",
        ),
        {},
    ),
    "translation": Recipe(
        (
            *TORCHRUN, "run_translation.py", "--deepspeed", "zero3.json", "--phrases", "200",
            "--eval_pairs", "8", "--max_steps", "2",
            "--logging_steps", "1", "--output_dir",
        ),
        {},
    ),
    "pre-layer-norm-bert": Recipe(
        (
            *TORCHRUN, "run_pre_layer_norm.py", "--deepspeed_config", "pre.json", "--num_layers",
            "2", "--h_dim", "16", "--sentence", "4",
            "--batch_size", "2", "--num_iterations", "2", "--log_every", "1", "--checkpoint_dir",
        ),
        INTERPRETED,
    ),
    "lightning": Recipe(
        (
            "python", "run_lightning.py", "--train_images", "128", "--batch_size", "32",
            "--max_steps", "2", "--max_epochs", "1",
            "--output_dir",
        ),
        {},
        "",
    ),
}  # fmt: skip


def run(name: str, folder: Path, as_cuda: bool) -> list[float]:
    """The losses of a recipe; on the device its ranks have used it, and have nothing to report."""
    recipe = FOUND[name]
    own = launched.environment() | {
        "LATE_REPORTS": f"{folder}-{{rank}}.json",
        "LATE_DEVICES": "2",
        **recipe.more,
    }
    # each is a Python of its own where a variable changes what is imported
    starts = sys.executable if recipe.more else launched.python()
    if as_cuda:
        on_device = launch.environment(as_cuda)
        own |= {name: on_device[name] for name in ("PYTHONPATH", "LATE_AS", "LATE_ALL")}
        own["PYTHON_EXEC"] = sys.executable if recipe.more else launch.python()
        if name == "lightning":
            starts = own["PYTHON_EXEC"]
        else:
            del own["LATE_ALL"]  # launchers stay without
    command = [
        str(folder.with_suffix(".yaml")) if word.endswith(".yaml") and as_cuda else word
        for word in recipe.command
    ]
    if as_cuda and name == "bert-mlm":
        config = yaml.safe_load((RECIPES / name / "zero3.yaml").read_text())
        folder.with_suffix(".yaml").write_text(yaml.safe_dump({**config, "use_cpu": False}))
    if command[0] == "python":
        command = [starts, *command[1:], str(folder)]
    else:
        program = shutil.which(command[0], path=launched.PROGRAMS)
        assert program is not None
        command = [starts, program, *command[1:], str(folder)]
    log = folder.with_suffix(".log")
    with launched.running(command, RECIPES / name, log, own) as process:
        code = launched.ended(process, 500)
    assert code == 0, log.read_text()[-4000:]
    if as_cuda:
        for rank in range(2):
            told: dict[str, Any] = json.loads(Path(f"{folder}-{rank}.json").read_text())
            assert told["stats"]["ops"] > 100 and told["reports"] == [], told
    if not recipe.history:
        return []
    states = [*folder.glob("trainer_state.json"), *folder.glob(recipe.history)]
    return [
        entry["loss"]
        for entry in json.loads(states[0].read_text())["log_history"]
        if "loss" in entry
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", FOUND)
def test_a_recipe_trains_without_a_report(name: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    losses = run(name, tmp_path / "late", as_cuda=True)
    assert all(map(math.isfinite, losses)) and len(losses) == (2 if FOUND[name].history else 0), (
        losses
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["cifar10", "gpt2"])  # the others have dropout
def test_a_recipe_has_the_losses_of_cpu_ranks(name: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    late = run(name, tmp_path / "late", as_cuda=True)
    cpu = run(name, tmp_path / "cpu", as_cuda=False)
    assert late == pytest.approx(cpu, rel=CLOSE)
