"""The recipes that start from a model and a data set of the hub: their files and figures; with
``--long`` a few steps of each card's first command.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from tests.helpers import launched
from tests.helpers.cells import in_one_item
from tests.integrations.test_recipes import NEEDS, RECIPES, ROOT, commands_of, script_of

RESULTS = ROOT / "scripts" / "bench" / "results" / "recipes-2026-11-24.jsonl"
STARTS = sorted(
    script.parent for script in RECIPES.glob("*/run_*.py") if "load_data(" in script.read_text()
)


def test_there_are_starts() -> None:
    assert {"8b-one-gpu-offload", "dpo", "grpo", "sft-lora"} <= {path.name for path in STARTS}


@in_one_item(STARTS)
def test_the_commands_and_figures_of_a_card(recipe: Path) -> None:
    first, *real = commands_of(recipe)
    assert first[:3] == ["accelerate", "launch", "--config_file"] and len(first) == 5
    assert real and all({"--model_name_or_path", "--dataset_name"} <= {*words} for words in real)
    files = {words[3] for words in (first, *real)}
    assert files == {path.name for path in recipe.glob("*.yaml")}
    for name in files:
        config = ZeroConfig.from_file(recipe / name, allow_auto=True)
        assert bool(config.launch.use_cpu) == (name == first[3])
        assert (config.precision == "fp32") == (name == first[3])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        import starting

        rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        (row,) = [row for row in rows if row["recipe"] == recipe.name]
        card = (recipe / "README.md").read_text()
        assert starting.card_line(starting.HEADINGS) in card
        assert starting.card_line(starting.cells(row)) in card
    assert "](curve.svg)" in card
    plot = ElementTree.parse(recipe / "curve.svg").getroot()
    assert plot.findall("{*}polyline") and plot[0].text == recipe.name


@pytest.mark.long
@pytest.mark.parametrize("recipe", STARTS, ids=lambda path: path.name)
def test_a_few_steps_of_the_first_command(recipe: Path, tmp_path: Path) -> None:
    if recipe.name in NEEDS:
        pytest.importorskip(NEEDS[recipe.name])
    words, out = commands_of(recipe)[0], tmp_path / "out"
    command = [*words, "--max_steps", "20", "--output_dir", str(out)]
    said = launched.output(command, recipe, tmp_path / "log.txt")
    assert "gradient_checkpointing` is deprecated" not in said
    row = json.loads((out / "row.json").read_text())
    name, first, last = row["result"]
    assert (row["recipe"], row["steps"]) == (recipe.name, 20) and row["state_bytes"] > 0
    assert last < first if "loss" in name else last > first
    assert ElementTree.parse(out / "curve.svg").getroot().findall("{*}polyline")


@pytest.mark.long
def test_grpo_sends_its_weights_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import starting

    for part in starting.load_causal(None):
        part.save_pretrained(tmp_path / "model")
    launcher, recipe = commands_of(RECIPES / "grpo")[0][:4], RECIPES / "grpo"
    stubbed = ROOT / "tests" / "matrix" / "scripts" / "grpo_recipe.py"
    sampled = ["--use_vllm", "--vllm_importance_sampling_correction", "false"]
    sampled += ["--num_generations", "2", "--per_device_train_batch_size", "2"]  # as the stub does
    command = [*launcher, str(stubbed), str(script_of(recipe)), *sampled, "--max_steps", "3"]
    places = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path)]
    said = launched.output([*command, *places], recipe, tmp_path / "log.txt")
    assert said.count("updates: 3") == 2  # on each rank, before each step


@pytest.mark.long
@pytest.mark.parametrize("name", ["80gb_gpu.yaml", "24gb_gpu.yaml"])
def test_the_bytes_that_the_card_of_8b_predicts(name: str, tmp_path: Path) -> None:
    recipe = RECIPES / "8b-one-gpu-offload"
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    stage = ZeroConfig.from_file(recipe / name).stage
    asked = [str(tmp_path), "--ranks", "1", "--config", str(recipe / name), "--seq", "2048"]
    shown = CliRunner().invoke(app, ["estimate", *asked]).output
    (line,) = re.findall(rf"^│ +\*{stage} │(.*)│ +0 B │$", shown.partition("with offload")[2], re.M)
    device, ram, _ = (cell.strip() for cell in line.split("│"))
    (row,) = re.findall(rf"^\| `{name}` \|.*\|$", (recipe / "README.md").read_text(), re.M)
    *_, state, activations, host, _ = (cell.strip() for cell in row.split("|"))
    # tests shard small parameters, too
    assert float(state.split()[0]) == pytest.approx(float(device.split()[0]), rel=5e-3)
    assert host == ram and activations in shown.partition("activations of")[2]


def test_a_data_set_that_is_not_there_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import starting

    with pytest.raises(SystemExit, match=r"nobody/wikitxt cannot be loaded \(.*\); correct"):
        starting.load_data("nobody/wikitxt", None, list, ("train", "test"))
