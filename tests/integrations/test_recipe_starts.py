"""The recipes that start from a model and a data set of the hub: their files; figures on the cards
of recipes, and with ``--long`` each from a run of the card's first command.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from tests.helpers.cells import in_one_item
from tests.integrations.test_recipes import NEEDS, RECIPES, ROOT, commands_of

RESULTS = ROOT / "scripts" / "bench" / "results" / "recipes-2026-11-24.jsonl"
STARTS = sorted(
    script.parent for script in RECIPES.glob("*/run_*.py") if "load_data(" in script.read_text()
)


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


# -- figures of cards ------------------------------------------------------------------------------

NAMES = [json.loads(line)["recipe"] for line in RESULTS.read_text().splitlines()]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import cards

    yield cards
    sys.modules.pop("cards", None)


def scores(loss: float, accuracy: float = 0.9) -> dict[str, Any]:
    return {"metrics": {"loss": [loss, 0.5], "accuracy": [accuracy]}}


# Two rows, and what is told of the second.
ROWS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (scores(2.0), scores(2.1, 0.92), []),
    (scores(2.0), scores(2.3), ["metrics.loss[0]: 2.0 was, 2.3 is"]),
    (scores(2.0), scores(2.0, 0.8), ["metrics.accuracy[0]: 0.9 was, 0.8 is"]),
    ({"tokens_per_second": 9.0, "seconds": 1.0}, {"tokens_per_second": 1.0, "seconds": 9.0}, []),
    ({"steps": 60}, {"steps": 61}, ["steps: 60 was, 61 is"]),
    ({"state_bytes": 1000}, {"state_bytes": 1005, "ranks": 2}, ["ranks: None was, 2 is"]),
    (None, {"state_bytes": 5}, ["state_bytes: None was, 5 is"]),
]


def test_figures_are_compared_with_tolerances(cards: Any) -> None:
    for old, new, told in ROWS:
        assert list(cards.differences(old, new)) == told
        assert list(cards.differences(cards.updated(old, new), new)) == []
        if old is not None and not told:
            assert cards.updated(old, new) == old


def test_a_recipe_in_which_rounding_grows_has_wider_tolerances(
    cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(cards.SPREADS) <= set(NAMES)
    for recipe, spread in cards.SPREADS.items():
        assert set(spread) <= set(cards.rows()[recipe]["metrics"])
    monkeypatch.setattr(cards, "SPREADS", {"chaotic": {"loss": 0.1, "accuracy": 0.05}})
    old = {"recipe": "chaotic", "metrics": {"loss": [2.0, 0.15], "accuracy": [0.1, 0.94]}}
    near = {"recipe": "chaotic", "metrics": {"loss": [2.0, 0.24], "accuracy": [0.1, 0.9]}}
    assert list(cards.differences(old, near)) == [] and cards.updated(old, near) == old
    others = {"recipe": "steady", "metrics": near["metrics"]}
    told = ["metrics.loss[1]: 0.15 was, 0.24 is", "metrics.accuracy[1]: 0.94 was, 0.9 is"]
    assert list(cards.differences({**old, "recipe": "steady"}, others)) == told


def test_the_results_in_the_front_matter_are_those_of_the_row(cards: Any) -> None:
    for recipe in NAMES:
        data = ModelCard.load(RECIPES / recipe / "README.md").data
        row = cards.rows()[recipe]
        ends = [ends[-1] for ends in row.get("metrics", {"result": row.get("result")}).values()]
        assert [each.metric_value for each in data.eval_results] == [round(end, 4) for end in ends]
        assert all(each.task_type == data.pipeline_tag for each in data.eval_results), recipe
        assert data.model_name, recipe


@pytest.mark.long
@pytest.mark.parametrize("recipe", NAMES)
def test_the_figures_of_a_card_are_those_of_its_command(
    cards: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the default, which other tests replace: the estimate counts what the command's ranks hold
    monkeypatch.setattr("hf_zero.zero.layout.wrap.PERSISTENCE", 100_000)
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe])
    assert list(cards.differences(cards.rows()[recipe], cards.run(recipe, tmp_path))) == []
