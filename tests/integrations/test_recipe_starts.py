"""The recipes that start from a model and a data set of the hub: their files; figures on the cards
of recipes, and with ``--long`` each from a run of the card's first command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard

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


# -- figures of cards ------------------------------------------------------------------------------

NAMES = [json.loads(line)["recipe"] for line in RESULTS.read_text().splitlines()]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import cards

    yield cards
    sys.modules.pop("cards", None)


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
