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
from tests.integrations.test_recipes import ROOT, module_of, script_of

RECIPES = ROOT / "recipes"


@pytest.fixture
def translation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES / "translation"))
    yield module_of(script_of(RECIPES / "translation"))
    sys.modules.pop("phrases", None)


def test_numbers_in_words(translation: Any) -> None:
    known = {
        0: ("zero", "null"),
        1: ("one", "eins"),
        16: ("sixteen", "sechzehn"),
        21: ("twenty-one", "einundzwanzig"),
        30: ("thirty", "dreißig"),
        101: ("one hundred and one", "einhunderteins"),
        342: ("three hundred and forty-two", "dreihundertzweiundvierzig"),
        1005: ("one thousand and five", "eintausendfünf"),
        21_000: ("twenty-one thousand", "einundzwanzigtausend"),
        101_277: (
            "one hundred and one thousand two hundred and seventy-seven",
            "einhunderteintausendzweihundertsiebenundsiebzig",
        ),
    }
    made = sys.modules["phrases"]
    assert {number: (made.english(number), made.german(number)) for number in known} == known


def test_phrases_are_different_and_the_same_each_time(translation: Any) -> None:
    pairs = translation.phrases(3000, 1)
    assert len({source for source, _ in pairs}) == 3000 and pairs == translation.phrases(3000, 1)
    some = dict(translation.phrases(20_000, 1))
    assert some["at half past six"] == "um halb sieben"
    assert some["at ten to four"] == "um zehn vor vier"
    assert next(
        target for source, target in some.items() if source.startswith("on the third of March")
    ).startswith("am dritten März neunzehnhundert")


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
    path = tmp_path / "made.mo"
    path.write_bytes(
        struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0) + tables + content
    )
    with open(path, "rb") as file:
        # the file is as gettext's own reader wants it
        assert gettext.GNUTranslations(file).gettext("Quit") == "Beenden"
    assert translation.read_catalogue(path) == [
        ("File not found", "Datei nicht gefunden"),
        ("Quit", "Beenden"),
    ]


def test_pictures_are_the_same_each_time_and_of_all_kinds() -> None:
    script = module_of(script_of(RECIPES / "cifar10"))
    images, kinds = script.draw(200, 3)
    assert images.shape == (200, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert set(kinds.tolist()) == set(range(10))
    assert all(torch.equal(*both) for both in zip((images, kinds), script.draw(200, 3)))
    assert not torch.equal(images, script.draw(200, 4)[0])


def test_the_presets_of_hello_bert_need_one_word_for_offload() -> None:
    for preset in sorted((RECIPES / "hello-bert").glob("zero*.json")):
        config = json.loads(preset.read_text())
        assert config["zero_optimization"]["offload_optimizer"] == {"device": "none"}
        config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
        assert ZeroConfig.from_dict(config).offload_optimizer == OffloadOptimizer("cpu")


def test_the_card_of_gpt2_quotes_what_is_refused() -> None:
    gpt2 = RECIPES / "gpt2"

    class Split:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(NotBuiltError) as refused:
        check_mpu(Split(), 2)
    assert str(refused.value) in (gpt2 / "README.md").read_text()


class OnMeta:
    """An engine on a device that is not the CPU, where torch refuses to mix devices as a GPU
    does.
    """

    device = torch.device("meta")

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, *given: Any, **batch: torch.Tensor) -> Any:
        tensors = [*given, *batch.values()]
        assert all(tensor.device == self.device for tensor in tensors)
        self.calls += 1
        return self.answer(tensors[0])

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def fp16_enabled(self) -> bool:
        return False

    bfloat16_enabled = fp16_enabled


def a_loss(tokens: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(loss=torch.zeros((), device=tokens.device))


@pytest.mark.parametrize("recipe", ["cifar10", "gpt2", "hello-bert"])
def test_evaluation_puts_nothing_of_the_host_among_what_is_on_the_device(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = module_of(script_of(RECIPES / recipe))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 0.0)  # a meta tensor has no value
    if recipe == "gpt2":
        monkeypatch.setattr(script.dist, "all_reduce", lambda tensor, group: None)
    else:
        alone = SimpleNamespace(
            get_rank=lambda: 0, get_world_size=lambda: 1, all_reduce=lambda tensor: None
        )
        monkeypatch.setattr(script.deepspeed, "comm", alone)
    if recipe == "cifar10":
        engine = OnMeta(lambda images: torch.zeros(len(images), 10, device=images.device))
        script.evaluate(engine, TensorDataset(*script.draw(70, 1)))
    elif recipe == "gpt2":
        engine = OnMeta(a_loss)
        unit = SimpleNamespace(
            get_data_parallel_rank=lambda: 0,
            get_data_parallel_world_size=lambda: 1,
            get_data_parallel_group=lambda: None,
        )
        script.evaluate(engine, torch.zeros(20, 8, dtype=torch.int64), unit)
    else:
        engine = OnMeta(a_loss)
        tokenizer = SimpleNamespace(
            cls_token_id=1, sep_token_id=2, mask_token_id=3, pad_token_id=0, vocab_size=50
        )
        monkeypatch.setattr(
            script, "masked", lambda rows, *rest, **seed: {"input_ids": rows, "labels": rows}
        )
        script.evaluate(
            engine,
            torch.zeros(20, 8, dtype=torch.int64),
            tokenizer,
            SimpleNamespace(batch_size=10, mask_prob=0.15),
        )
    assert engine.calls == 2


def test_an_unknown_argument_of_translation_is_named_in_one_line(
    translation: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--learning_rte", "1"])
    with pytest.raises(SystemExit, match="2"):
        translation.main()
    assert "unrecognized arguments: --learning_rte 1" in capsys.readouterr().err.splitlines()[-1]


LOADERS = {
    "bert-mlm": "load_texts",
    "cifar10": "load_images",
    "gpt2": "load_texts",
    "hello-bert": "load_texts",
    "lightning": "load_images",
    "translation": "load_pairs",
}


@pytest.mark.parametrize("configuration", [True, False], ids=["configuration", "name"])
@pytest.mark.parametrize("recipe", LOADERS)
def test_a_data_set_that_is_not_there_is_not_replaced_by_another(
    recipe: str, configuration: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one whose name is wrong, nor one whose configuration is."""
    if configuration:
        unknown = Mock(side_effect=ValueError("BuilderConfig 'wrong' not found"))
        monkeypatch.setattr("datasets.load_dataset", unknown)
    monkeypatch.syspath_prepend(str(RECIPES / recipe))
    script = module_of(script_of(RECIPES / recipe))
    args = SimpleNamespace(
        dataset_name="nobody/wikitxt",
        dataset_config_name=None,
        catalogue=None,
        train_images=8,
        phrases=8,
    )
    with pytest.raises(
        SystemExit,
        match=r"nobody/wikitxt cannot be loaded \(.*\); correct the name, or "
        r"leave --dataset_name out",
    ):
        getattr(script, LOADERS[recipe])(args, *([1] if recipe == "translation" else []))
    sys.modules.pop("phrases", None)


def test_every_recipe_that_takes_a_data_set_is_among_them() -> None:
    """Or among those of test_recipe_starts.py, which have one loader."""
    assert {
        script.parent.name
        for script in RECIPES.glob("*/run_*.py")
        if "dataset_name" in script.read_text() and "load_data(" not in script.read_text()
    } == set(LOADERS)
