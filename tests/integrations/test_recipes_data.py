"""Data that the recipes make or read without a hub, and the refusals that their cards quote."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import TensorDataset

from hf_zero.config import OffloadOptimizer, ZeroConfig
from hf_zero.distributed.parallel_dims import check_mpu
from hf_zero.errors import NotBuiltError
from tests.helpers.cells import in_turn
from tests.integrations.test_recipes import RECIPES, module_of, script_of


def test_phrases_are_different_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES / "translation"))
    translation = module_of(script_of(RECIPES / "translation"))
    pairs = translation.phrases(3000, 1)
    assert len({source for source, _ in pairs}) == 3000 and pairs == translation.phrases(3000, 1)
    assert dict(translation.phrases(20_000, 1))["at ten to four"] == "um zehn vor vier"
    sys.modules.pop("phrases", None)


def test_the_presets_of_hello_bert_and_the_card_of_gpt2() -> None:
    """Offload needs one word; what is refused is quoted."""
    for preset in sorted((RECIPES / "hello-bert").glob("zero*.json")):
        config = json.loads(preset.read_text())
        assert config["zero_optimization"]["offload_optimizer"] == {"device": "none"}
        config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
        assert ZeroConfig.from_dict(config).offload_optimizer == OffloadOptimizer("cpu")
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


@in_turn("evaluate", [evaluate_cifar10, evaluate_gpt2, evaluate_hello_bert])
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


def test_a_data_set_that_cannot_be_loaded_is_not_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {script.parent.name: script.read_text() for script in RECIPES.glob("*/run_*.py")}
    taking = {name for name, text in texts.items() if "dataset_name" in text}
    # those that call load_data have the loader of starting.py
    assert {name for name in taking if "load_data(" not in texts[name]} == set(LOADERS)
    args = SimpleNamespace(dataset_name="nobody/wikitxt", dataset_config_name=None, catalogue=None)
    args.train_images = args.phrases = 8
    unknown = Mock(side_effect=ValueError("BuilderConfig 'wrong' not found"))
    monkeypatch.setattr("datasets.load_dataset", unknown)
    said = r"nobody/wikitxt cannot be loaded \(.*\); correct"
    for recipe, loader in LOADERS.items():
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(RECIPES / recipe))
            script = module_of(script_of(RECIPES / recipe))
        with pytest.raises(SystemExit, match=said):
            getattr(script, loader)(args, *([1] if recipe == "translation" else []))
        sys.modules.pop("phrases", None)
    monkeypatch.syspath_prepend(str(RECIPES))
    import starting

    with pytest.raises(SystemExit, match=said):
        starting.load_data("nobody/wikitxt", None, list, ("train", "test"))
