"""The first command of each recipe's card, as ``hf-zero parity`` starts its script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import launched
from tests.integrations.test_recipes import NEEDS, RECIPES, commands_of

STEPS = "3"
# Whose first command compares several runs, is no loop of one engine, or needs more than two ranks,
# and those with settings that no torch has.
LEFT_OUT = {
    "8b-one-gpu-offload", "bert-large-batch", "curriculum", "curriculum-sampling", "elastic",
    "kubernetes", "lamb-large-batch", "layer-drop", "long-context", "mixed-lengths", "moe",
    "notebook", "pipeline", "pre-layer-norm-bert", "quantization", "random-ltd", "ray",
    "slow-network", "slurm", "tensor-parallel",
}  # fmt: skip
NAMES = sorted({path.parent.name for path in RECIPES.glob("*/run_*.py")} - LEFT_OUT)


def words_of(recipe: Path) -> list[str]:
    """The arguments of ``hf-zero parity`` for the first command of the card of ``recipe``."""
    words = commands_of(recipe)[0]
    at = next(at for at, word in enumerate(words) if word.endswith(".py"))
    launch, script = words[:at], words[at:]
    if "--config_file" in launch:
        file = launch[launch.index("--config_file") + 1]
        return ["--config", file, "--", *script]
    return ["--ranks", "2", "--", *script]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_as_with_torch(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    folder = tmp_path / name
    shutil.copytree(RECIPES / name, folder)
    for helper in RECIPES.glob("*.py"):
        shutil.copy(helper, tmp_path)
    words = ["hf-zero", "parity", "--json", "--steps", STEPS, *words_of(folder)]
    text = launched.output(words, folder, tmp_path / "log.txt", 900.0)
    answer = json.loads(text[text.index("{") :])
    assert answer["equal"], text
    assert answer["steps"] >= int(STEPS)
