"""Data that the recipes make or read without a hub, and the refusals that their cards quote."""

from __future__ import annotations

import gettext
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import TensorDataset

from hf_zero.config import OffloadOptimizer, ZeroConfig
from hf_zero.distributed.parallel_dims import check_mpu
from hf_zero.errors import NotBuiltError
from tests.integrations.test_recipes import RECIPES, module_of, script_of


@pytest.fixture
def translation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES / "translation"))
    yield module_of(script_of(RECIPES / "translation"))
    sys.modules.pop("phrases", None)


def test_phrases_are_different_and_the_same_each_time(translation: Any) -> None:
    pairs = translation.phrases(3000, 1)
    assert len({source for source, _ in pairs}) == 3000 and pairs == translation.phrases(3000, 1)
    some = dict(translation.phrases(20_000, 1))
    assert some["at half past six"] == "um halb sieben"
    assert some["at ten to four"] == "um zehn vor vier"
    date = next(source for source in some if source.startswith("on the third of March"))
    assert some[date].startswith("am dritten März neunzehnhundert")


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogues_of_messages(order: str, translation: Any, tmp_path: Path) -> None:
    messages = {
        "": "Language: de\n",
        "a\0as": "ein\0viele",
        "File not found": "Datei nicht gefunden",
        "Quit": "Beenden",
        "two\nlines": "zwei\nZeilen",
    }
    names, values = ([text.encode() for text in side] for side in (messages, messages.values()))
    count, start = len(messages), 28 + 16 * len(messages)
    tables, content = b"", b""
    for text in [*names, *values]:
        tables += struct.pack(f"{order}2I", len(text), start + len(content))
        content += text + b"\0"
    header = struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    path = tmp_path / "made.mo"
    path.write_bytes(header + tables + content)
    with open(path, "rb") as file:  # as gettext's own reader wants it
        assert gettext.GNUTranslations(file).gettext("Quit") == "Beenden"
    expected = [("File not found", "Datei nicht gefunden"), ("Quit", "Beenden")]
    assert translation.read_catalogue(path) == expected


def test_the_presets_of_hello_bert_need_one_word_for_offload() -> None:
    for preset in sorted((RECIPES / "hello-bert").glob("zero*.json")):
        config = json.loads(preset.read_text())
        assert config["zero_optimization"]["offload_optimizer"] == {"device": "none"}
        config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
        assert ZeroConfig.from_dict(config).offload_optimizer == OffloadOptimizer("cpu")


def test_the_card_of_gpt2_quotes_what_is_refused() -> None:
    with pytest.raises(NotBuiltError) as refused:
        check_mpu(SimpleNamespace(get_model_parallel_world_size=lambda: 2), 2)
    assert str(refused.value) in (RECIPES / "gpt2" / "README.md").read_text()


class OnMeta:
    """An engine on a device that is not the CPU, where torch refuses to mix devices as a GPU
    does.
    """

    device = torch.device("meta")
    eval = train = fp16_enabled = bfloat16_enabled = lambda self: False

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.calls = answer or a_loss, 0

    def __call__(self, *given: Any, **batch: torch.Tensor) -> Any:
        tensors = [*given, *batch.values()]
        assert all(tensor.device == self.device for tensor in tensors)
        self.calls += 1
        return self.answer(tensors[0])


def a_loss(tokens: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(loss=torch.zeros((), device=tokens.device))


ROWS = torch.zeros(20, 8, dtype=torch.int64)


def evaluate_cifar10(script: Any) -> OnMeta:
    engine = OnMeta(lambda images: torch.zeros(len(images), 10, device=images.device))
    script.evaluate(engine, TensorDataset(*script.draw(70, 1)))
    return engine


def evaluate_gpt2(script: Any) -> OnMeta:
    engine = OnMeta()
    unit = SimpleNamespace(
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_world_size=lambda: 1,
        get_data_parallel_group=lambda: None,
    )
    script.evaluate(engine, ROWS, unit)
    return engine


def evaluate_hello_bert(script: Any) -> OnMeta:
    engine = OnMeta()
    tokens = {"cls_token_id": 1, "sep_token_id": 2, "mask_token_id": 3, "pad_token_id": 0}
    script.masked = lambda rows, *rest, **seed: {"input_ids": rows, "labels": rows}
    args = SimpleNamespace(batch_size=10, mask_prob=0.15)
    script.evaluate(engine, ROWS, SimpleNamespace(**tokens, vocab_size=50), args)
    return engine


@pytest.mark.parametrize("evaluate", [evaluate_cifar10, evaluate_gpt2, evaluate_hello_bert])
def test_evaluation_puts_nothing_of_the_host_among_what_is_on_the_device(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = evaluate.__name__.removeprefix("evaluate_").replace("_", "-")
    script = module_of(script_of(RECIPES / recipe))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 0.0)  # a meta tensor has no value
    if recipe == "gpt2":
        monkeypatch.setattr(script.dist, "all_reduce", lambda tensor, group: None)
    else:
        sums = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda tensor: 0}
        monkeypatch.setattr(script.deepspeed, "comm", SimpleNamespace(**sums))
    assert evaluate(script).calls == 2


LOADERS = {
    "bert-mlm": "load_texts",
    "cifar10": "load_images",
    "gpt2": "load_texts",
    "hello-bert": "load_texts",
    "lightning": "load_images",
    "translation": "load_pairs",
}


@pytest.mark.parametrize("recipe", LOADERS)
def test_a_data_set_that_is_not_there_is_not_replaced_by_another(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one whose name is wrong, nor one whose configuration is."""
    monkeypatch.syspath_prepend(str(RECIPES / recipe))
    script = module_of(script_of(RECIPES / recipe))
    args = SimpleNamespace(dataset_name="nobody/wikitxt", dataset_config_name=None, catalogue=None)
    args.train_images = args.phrases = 8
    unknown = Mock(side_effect=ValueError("BuilderConfig 'wrong' not found"))
    for configuration in (False, True):
        if configuration:
            monkeypatch.setattr("datasets.load_dataset", unknown)
        with pytest.raises(SystemExit, match=r"nobody/wikitxt cannot be loaded \(.*\); correct"):
            getattr(script, LOADERS[recipe])(args, *([1] if recipe == "translation" else []))
    sys.modules.pop("phrases", None)


def test_every_recipe_that_takes_a_data_set_is_among_them() -> None:
    """Or among those of test_recipe_starts.py, which have one loader."""
    texts = {script.parent.name: script.read_text() for script in RECIPES.glob("*/run_*.py")}
    taking = {name for name, text in texts.items() if "dataset_name" in text}
    assert {name for name in taking if "load_data(" not in texts[name]} == set(LOADERS)
