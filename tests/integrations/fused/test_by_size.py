"""``kernels: auto`` by the width of blocks: none in narrow ones that are not compiled."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.integrations.fused import narrow_blocks, report
from hf_zero.integrations.fused.by_size import NARROW, width_of
from hf_zero.integrations.fused.optimize import IN_BLOCKS
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" selects what it would on a GPU; references of the kernels run."""
    for name in ("hf_zero.setup.plan", "hf_zero.integrations.fused.optimize"):
        module = importlib.import_module(name)  # the package has a function of the name
        monkeypatch.setattr(module, "kind_for_auto", lambda device: "cuda")


def llama(width: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def in_blocks(model: nn.Module) -> set[str]:
    """The kernels in blocks, by the report."""
    return {
        name for line in report(model).replaced if ".layers." in line.where for name in line.kernels
    }


def test_narrow_blocks_are_left_to_torch() -> None:
    wide, narrow = llama(NARROW + 64), llama(64)
    assert [width_of(each.model.layers[0]) for each in (wide, narrow)] == [NARROW + 64, 64]
    for model in (wide, narrow):
        hf_zero.optimize(model)
    assert in_blocks(wide) >= {"norms", "activations", "rotary", "qkv"}
    assert not in_blocks(narrow)
    said = {name: line.why_not for line in report(narrow).lines for name in line.kernels}
    assert "1 blocks of width 64 are narrow" in said["norms"]
    assert "norms" in {name for line in report(narrow).replaced for name in line.kernels}
    hf_zero.optimize(narrow, IN_BLOCKS)  # by name
    assert in_blocks(narrow) >= {"norms", "activations", "rotary", "qkv"}


@pytest.mark.parametrize("compile", [{}, {"compile": {"blocks": True, "backend": "eager"}}])
def test_an_engine_chooses_alike(compile: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = ARCHITECTURES["llama"].build()
    engine = start(
        model, torch.optim.AdamW(model.parameters()), config_of(1, kernels="auto", **compile)
    )
    assert in_blocks(engine.module) == ({"qkv"} if compile else set())
    engine.destroy()
    named = {"kernels": ["norms", "activations"], **compile}
    model = ARCHITECTURES["llama"].build()
    engine = start(model, torch.optim.AdamW(model.parameters()), config_of(1, **named))
    assert in_blocks(engine.module) == {"norms", "activations"}
    engine.destroy()


def test_widths_of_other_layers() -> None:
    gpt2 = ARCHITECTURES["gpt2"].build()
    blocks = [*gpt2.transformer.h]
    assert narrow_blocks(blocks) == blocks and width_of(blocks[0]) == gpt2.config.n_embd
    assert narrow_blocks([nn.LayerNorm(8)]) == []  # nothing is known of it
