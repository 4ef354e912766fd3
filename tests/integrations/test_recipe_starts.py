"""The recipes that start from a model and a data set of the hub: their files; figures on the cards
of recipes, and with ``--long`` each from a run of the card's first command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from huggingface_hub import ModelCard

from hf_zero.config import ZeroConfig
from tests.helpers.cells import in_one_item
from tests.integrations.test_recipes import (
    NEEDS,
    RECIPES,
    ROOT,
    commands_of,
    module_of,
    script_of,
)

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


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    import starting

    return starting


def test_a_run_resumes_and_a_run_without_a_curve_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without evaluations there is no result, and the model is saved all the same."""
    script = script_of(RECIPES / "t5-summarization")

    def train(steps: int, *more: str) -> dict[str, Any]:
        words = ["--max_steps", str(steps), "--per_device_train_batch_size", "2", "--use_cpu"]
        words += ["--eval_strategy", "no", "--eval_on_start", "False", "--logging_steps", "1"]
        words += ["--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [script.name, *words, *more])
        module_of(script).main()
        state = tmp_path / f"checkpoint-{steps}" / "trainer_state.json"
        return dict(json.loads(state.read_text()))

    for wanted in ("latest", str(tmp_path / "checkpoint-7")):
        with pytest.raises(SystemExit, match=r"no checkpoint in|not a checkpoint of the"):
            train(1, "--resume_from_checkpoint", wanted)
    train(2)
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["result"] is None and (tmp_path / "model.safetensors").is_file()
    first = (tmp_path / "checkpoint-1" / "model.safetensors").stat().st_mtime_ns
    state = train(3, "--resume_from_checkpoint", "latest")
    steps = [each["step"] for each in state["log_history"] if "loss" in each]
    assert steps == [1, 2, 3]
    assert first == (tmp_path / "checkpoint-1" / "model.safetensors").stat().st_mtime_ns


NAMES_OF_TRL = {
    "model_name_or_path": "some/model",
    "model_revision": "main",
    "dtype": None,
    "attn_implementation": None,
    "load_in_4bit": False,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None,
}


def test_options_of_a_model_are_passed_on_or_refused(starting: Any) -> None:
    """The built-in model takes none of them."""
    args = SimpleNamespace(trust_remote_code=False)

    def options(**given: Any) -> dict[str, Any]:
        return dict(starting.options_of(SimpleNamespace(**NAMES_OF_TRL | given), args))

    assert options() == options(model_name_or_path=None) == {}
    chosen = {"dtype": "float16", "attn_implementation": "eager"}
    assert options(**chosen, model_revision="v2") == {**chosen, "revision": "v2"}
    four = options(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")["quantization_config"]
    assert four.load_in_4bit and four.bnb_4bit_quant_storage == torch.bfloat16
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert options(load_in_8bit=True)["quantization_config"].load_in_8bit
    args.trust_remote_code = True
    assert options() == {"trust_remote_code": True}
    for given in ({"load_in_4bit": True}, {"dtype": "float32"}, {"model_revision": "v2"}):
        (name,) = given
        with pytest.raises(SystemExit, match=f"--{name}: .*--model_name_or_path"):
            options(model_name_or_path=None, **given)


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
