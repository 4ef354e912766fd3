"""Blocks with fused kernels in one graph: what a forward asks of its modules is nothing that
Dynamo stops at.
"""

from __future__ import annotations

import pytest
import torch

import hf_zero
from tests.helpers.cells import fast
from tests.integrations.fused.animals import BLOCKS, build, error, inputs, step

NAMES = ["llama", "qwen3", "gemma2", "phi", "phi3", "bert", "distilbert", "gpt2", "t5", "vit"]
OFTEN = ["llama", "bert"]


@pytest.mark.parametrize("name", fast(NAMES, lambda name: name in OFTEN))
def test_a_block_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    torch._dynamo.reset()
    batch, right = inputs(name), step(build(name), inputs(name))
    model = hf_zero.optimize(build(name), BLOCKS)
    blocks = [
        module
        for module in model.modules()
        if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)
    ]
    assert len(blocks) >= 2
    for block in blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    loss, grads = step(model, batch)
    torch.testing.assert_close(loss, right[0], rtol=1e-5, atol=0)
    assert max(error(grads, right[1]).values()) < 1e-5
