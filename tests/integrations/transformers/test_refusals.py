"""Refusals, by name and with the remedy, of cases that would end in another library's error, or in
another training than was meant.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    Trainer,
)

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError, PartitionError
from hf_zero.integrations.transformers.trainer_route import refuse_full_eval


def bert() -> BertForMaskedLM:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 8,
    }
    return BertForMaskedLM(BertConfig(vocab_size=20, **sizes))


@pytest.mark.parametrize("loader", [AutoModelForMaskedLM, BertForMaskedLM])
def test_a_sharded_checkpoint_is_no_model_folder(tmp_path: Path, loader: Any) -> None:
    state = tmp_path / "step_200"
    (state / "pytorch_model").mkdir(parents=True)
    (state / "pytorch_model" / "manifest.json").write_text("{}")
    (state / "scheduler.bin").touch()
    for folder in (tmp_path, state, state / "pytorch_model"):
        with pytest.raises(CheckpointError, match=f"hf-zero convert-checkpoint {folder} MODEL"):
            loader.from_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))).save_pretrained(state)
    # it lies beside the checkpoint, and asks for the model's configuration
    assert AutoTokenizer.from_pretrained(state).vocab_size == 1
    bert().save_pretrained(state)  # a Trainer's folder is both
    assert loader.from_pretrained(state).config.vocab_size == 20


@pytest.mark.parametrize("stage", [1, 3])
def test_embeddings_are_resized_before(stage: int) -> None:
    model = bert()
    model.resize_token_embeddings(24)
    engine, *_ = hf_zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config={"stage": stage}
    )
    try:
        with pytest.raises(
            PartitionError,
            match=r"resize_token_embeddings\(30\) .*resize before hf_zero.initialize",
        ):
            engine.resize_token_embeddings(30)
    finally:
        engine.destroy()


def test_a_model_by_name_and_a_preset_by_place() -> None:
    with pytest.raises(
        ConfigError,
        match=r"not 'bert'; pass the torch.nn.Module to train, such as "
        r"AutoModel.from_pretrained\('bert'\)",
    ):
        hf_zero.initialize(model="bert", config="zero3")
    with pytest.raises(ConfigError, match="not a list; pass the"):
        hf_zero.initialize(model=[], config="zero3")
    with pytest.raises(ConfigError, match="more than one config"):
        hf_zero.initialize(nn.Linear(2, 2), "zero3", config="zero1")
    engine, *_ = hf_zero.initialize(nn.Linear(2, 2), "zero1")
    assert engine.config.stage == 1
    engine.destroy()


def test_one_process_beside_other_devices_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hf_zero.initialize import _tell_of_other_devices

    module = __import__("sys").modules["hf_zero.initialize"]
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    monkeypatch.setattr(module, "device_count", lambda: 8)
    monkeypatch.setattr(module.process_group, "is_initialized", lambda: False)
    for launched in (SimpleNamespace(), None):
        _tell_of_other_devices.cache_clear()
        monkeypatch.setattr(module, "announce", lambda place=launched: place)
        _tell_of_other_devices()
        assert ("one process trains on one of 8 devices" in caplog.text) is (launched is None)
    caplog.clear()
    _tell_of_other_devices()
    assert caplog.text == ""
    _tell_of_other_devices.cache_clear()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_an_evaluation_in_another_precision(kind: str) -> None:
    arguments = {"bf16": False, "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False}
    with pytest.raises(ConfigError, match=f"{kind}_full_eval=True without {kind}=True"):
        refuse_full_eval(
            {"zero_optimization": {"stage": 2}},
            SimpleNamespace(**arguments | {f"{kind}_full_eval": True}),
        )
    refuse_full_eval(
        {kind: {"enabled": True}}, SimpleNamespace(**arguments | {f"{kind}_full_eval": True})
    )
    refuse_full_eval({}, SimpleNamespace(**arguments | {f"{kind}_full_eval": True, kind: True}))
    refuse_full_eval({}, SimpleNamespace(**arguments))


@pytest.mark.usefixtures("plain_process")
@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
def test_completions_of_ranks_that_share_layers_are_not_compared(kind: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    written = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    args = getattr(trl, kind)(
        str(tmp_path), deepspeed=written, use_cpu=True, bf16=False, report_to=[], num_generations=2
    )
    with pytest.raises(ConfigError, match=r"autotp_size = 2 ranks 0, 1 sample the same ones"):
        Trainer(bert(), args)
