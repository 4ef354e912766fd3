"""``hf-zero parity --layers``: models of Transformers with their first blocks only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
)

import hf_zero
from hf_zero.errors import DoesNotFitError
from hf_zero.initialize import replace_start
from hf_zero.parity import fewer_layers, memory
from hf_zero.parity.fewer_layers import block_lists, cut, make_first_blocks
from hf_zero.setup.request import SetupRequest
from tests.helpers import launched

SHAPE: dict[str, int] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BLOCKS = 4
SCRIPT = """
import sys
import torch, hf_zero
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
engine, *_ = hf_zero.initialize(model=model, config={"zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
assert len(engine.module.model.layers) == 2
ids = torch.arange(24).view(2, 12) % 16
while True:
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
"""


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=BLOCKS))


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = PreTrainedModel.__init__
    monkeypatch.setattr(fewer_layers, "_layers", 2)
    monkeypatch.setattr(fewer_layers, "_before", [])

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        make_first_blocks(original, self, config, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "__init__", init)
    yield


def test_configurations_of_models() -> None:
    qwen = Qwen3Config(**SHAPE, num_hidden_layers=BLOCKS)
    assert cut(qwen, 2) == BLOCKS and qwen.num_hidden_layers == len(qwen.layer_types) == 2
    seq2seq = T5Config(num_layers=3, num_decoder_layers=5)
    assert cut(seq2seq, 2) == 5
    assert (seq2seq.num_layers, seq2seq.num_decoder_layers) == (2, 2)
    assert cut(qwen, 9) == 2 and qwen.num_hidden_layers == 2  # it has fewer


def test_the_first_blocks_are_made_and_loaded(tmp_path: Path, two_blocks: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fewer_layers, "_layers", BLOCKS)
        whole = llama()
        whole.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert fewer_layers.blocks_before() == BLOCKS
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert len(model.model.layers) == 2
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert (
        len(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).model.layers)
        == 2
    )


def test_the_number_of_blocks_that_fit_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    (blocks,) = block_lists(model)
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "train_batch_size": 1}
    needed = 20 * sum(parameter.numel() for parameter in model.parameters())
    needed += sum(buffer.nbytes for buffer in model.buffers())
    requests: list[SetupRequest[Any]] = []
    replace_start(requests.append)
    try:
        hf_zero.initialize(model=model, config=config)
    finally:
        replace_start(None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    assert memory.refuse_too_large(requests[0]) == needed
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 20 * block - 1)
    with pytest.raises(DoesNotFitError, match="pass --layers 2, which makes and loads 2 of 4"):
        memory.refuse_too_large(requests[0])
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)
    with pytest.raises(DoesNotFitError, match="compare the script with a smaller model"):
        memory.refuse_too_large(requests[0])


@pytest.mark.long
def test_a_script_that_loads_a_model(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    script, log = tmp_path / "train.py", tmp_path / "log.txt"
    script.write_text(SCRIPT)
    options = ["--ranks", "2", "--steps", "2", "--layers", "2", "--json"]
    words = ["hf-zero", "parity", *options, "--", str(script), str(tmp_path / "model")]
    text = launched.output(words, tmp_path, log)
    answer = json.loads(text[text.index("{") :])
    assert answer["equal"], text
    assert answer["parameters"] == len([*llama().parameters()]) - 2 * len(
        [*llama().model.layers[0].parameters()]
    )
    assert "UNEXPECTED" not in text


@pytest.mark.long
def test_a_script_without_a_model_of_transformers(tmp_path: Path) -> None:
    script, log = Path(__file__).parent / "scripts" / "resuming_loop.py", tmp_path / "log.txt"
    words = ["parity", "--ranks", "1", "--steps", "1", "--layers", "2", "--", str(script)]
    program = [launched.python(), f"{launched.PROGRAMS}/hf-zero", *words]
    with launched.running(program, tmp_path, log) as process:
        assert launched.ended(process, 240.0) == 2, log.read_text()
    assert "--layers 2: the script makes no model of Transformers whose" in " ".join(
        log.read_text().split()
    )


def test_a_list_of_blocks_is_found_by_its_configuration() -> None:
    model = nn.Sequential(llama(), nn.ModuleList([nn.Linear(1, 1) for _ in range(BLOCKS)]))
    assert block_lists(model) == [model[0].model.layers]
