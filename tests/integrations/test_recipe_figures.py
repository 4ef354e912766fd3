"""Figures on the cards of recipes: their tolerances, and with ``--long`` each from a run of the
card's first command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.integrations.test_recipe_starts import RESULTS
from tests.integrations.test_recipes import NEEDS, RECIPES, ROOT

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
    far = {"recipe": "chaotic", "metrics": {"loss": [2.0, 0.26], "accuracy": [0.1, 0.88]}}
    assert list(cards.differences(old, near)) == [] and cards.updated(old, near) == old
    told = ["metrics.loss[1]: 0.15 was, 0.26 is", "metrics.accuracy[1]: 0.94 was, 0.88 is"]
    assert list(cards.differences(old, far)) == told and cards.updated(old, far) == far
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
