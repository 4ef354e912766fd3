"""``from_pretrained`` in shards, on real ranks: the plain loader's model, bit for bit, and what
scripts do with it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import transformers

from tests.loading.cases import CASES, loads_like_the_plain_loader
from tests.loading.on_ranks import Case, run_cases
from tests.loading.zoo import MORE, ZOO, save

Outcomes = dict[str, str]
# like another one to a loader; cases load some of them, too
SELDOM = ("roberta", "gpt2", "qwen2", "deepseek_v3", "mamba")
OFTEN = [name for name in ZOO if name not in SELDOM]


def assert_passed(outcome: str) -> None:
    if outcome:
        pytest.fail(outcome, pytrace=False)


def models(names: list[str]) -> dict[str, Case]:
    return {name: partial(loads_like_the_plain_loader, name=name) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    transformers.logging.disable_progress_bar()
    save(ZOO, made)
    return made


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Outcomes:
    return run_cases(2, models(OFTEN) | CASES, folder)


def test_the_folders_are_as_the_hub_keeps_them(folder: Path) -> None:
    assert len(ZOO) >= 12
    for name in ZOO:
        assert len(list((folder / name).glob("*.safetensors"))) > 1, name
    stored = json.loads((folder / "mixtral" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    # the model has them merged
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in stored


@pytest.mark.parametrize("name", OFTEN)
def test_a_model_in_shards_is_the_model(name: str, two_ranks: Outcomes) -> None:
    assert_passed(two_ranks[name])


@pytest.mark.parametrize("case", CASES)
def test_loading_in_shards(case: str, two_ranks: Outcomes) -> None:
    assert_passed(two_ranks[case])


# -- the long ones ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    made = tmp_path_factory.mktemp("more")
    save([*SELDOM, *MORE], made)
    return run_cases(2, models([*SELDOM, *MORE]), made)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SELDOM, *MORE])
def test_more_models_in_shards(name: str, more: Outcomes) -> None:
    assert_passed(more[name])


@pytest.mark.long
def test_four_ranks_without_the_hook_at_the_start_of_python(folder, monkeypatch):
    """``hf_zero.from_pretrained`` puts the seams in by itself."""
    monkeypatch.setenv("HF_ZERO_AUTOLOAD", "0")
    chosen = models(["llama", "mixtral", "qwen2", "deepseek_v3", "wav2vec2"]) | {
        name: CASES[name] for name in ("saving", "bytes of the files")
    }
    assert run_cases(4, chosen, folder, start="spawn") == dict.fromkeys(chosen, "")
