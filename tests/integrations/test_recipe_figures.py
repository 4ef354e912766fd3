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

from tests.integrations.test_recipe_starts import NEEDS

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "scripts" / "bench" / "results" / "recipes-2026-11-24.jsonl"
NAMES = [json.loads(line)["recipe"] for line in ROWS.read_text().splitlines()]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import cards

    yield cards
    sys.modules.pop("cards", None)


@pytest.mark.parametrize(
    "old, new, told",
    [
        ({"metrics": {"loss": [2.0, 0.5]}}, {"metrics": {"loss": [2.1, 0.54]}}, []),
        (
            {"metrics": {"loss": [2.0, 0.5]}},
            {"metrics": {"loss": [2.3, 0.5]}},
            ["metrics.loss[0]: 2.0 was, 2.3 is"],
        ),
        ({"metrics": {"accuracy": [0.9]}}, {"metrics": {"accuracy": [0.92]}}, []),
        (
            {"metrics": {"accuracy": [0.9]}},
            {"metrics": {"accuracy": [0.8]}},
            ["metrics.accuracy[0]: 0.9 was, 0.8 is"],
        ),
        (
            {"tokens_per_second": 9.0, "seconds": 1.0},
            {"tokens_per_second": 1.0, "seconds": 9.0},
            [],
        ),
        ({"steps": 60}, {"steps": 61}, ["steps: 60 was, 61 is"]),
        ({"state_bytes": 1000}, {"state_bytes": 1005, "ranks": 2}, ["ranks: None was, 2 is"]),
        (None, {"state_bytes": 5}, ["state_bytes: None was, 5 is"]),
    ],
)
def test_figures_are_compared_with_tolerances(
    cards: Any, old: Any, new: dict[str, Any], told: list[str]
) -> None:
    assert list(cards.differences(old, new)) == told
    assert list(cards.differences(cards.updated(old, new), new)) == []
    if old is not None and not told:
        assert cards.updated(old, new) == old


def test_a_recipe_in_which_rounding_grows_has_wider_tolerances(
    cards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "SPREADS", {"chaotic": {"loss": 0.1, "accuracy": 0.05}})
    old = {"recipe": "chaotic", "metrics": {"loss": [2.0, 0.15], "accuracy": [0.1, 0.94]}}
    near = {"recipe": "chaotic", "metrics": {"loss": [2.0, 0.24], "accuracy": [0.1, 0.9]}}
    far = {"recipe": "chaotic", "metrics": {"loss": [2.0, 0.26], "accuracy": [0.1, 0.88]}}
    assert list(cards.differences(old, near)) == []
    assert cards.updated(old, near) == old
    told = ["metrics.loss[1]: 0.15 was, 0.26 is", "metrics.accuracy[1]: 0.94 was, 0.88 is"]
    assert list(cards.differences(old, far)) == told
    assert cards.updated(old, far) == far
    others = {"recipe": "steady", "metrics": near["metrics"]}
    told = ["metrics.loss[1]: 0.15 was, 0.24 is", "metrics.accuracy[1]: 0.94 was, 0.9 is"]
    assert list(cards.differences({**old, "recipe": "steady"}, others)) == told


def test_the_recipes_with_wider_tolerances_have_rows(cards: Any) -> None:
    assert set(cards.SPREADS) <= set(NAMES)
    for recipe, spread in cards.SPREADS.items():
        assert set(spread) <= set(cards.rows()[recipe]["metrics"])


@pytest.mark.parametrize("recipe", NAMES)
def test_the_results_in_the_front_matter_are_those_of_the_row(cards: Any, recipe: str) -> None:
    data = ModelCard.load(ROOT / "recipes" / recipe / "README.md").data
    row = cards.rows()[recipe]
    ends = [ends[-1] for ends in row.get("metrics", {"result": row.get("result")}).values()]
    assert [each.metric_value for each in data.eval_results] == [round(end, 4) for end in ends]
    assert all(each.task_type == data.pipeline_tag for each in data.eval_results)
    assert data.model_name


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
