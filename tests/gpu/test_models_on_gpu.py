"""Fused kernels in models on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.integrations.fused import report
from hf_zero.ops import dispatch
from tests.integrations.fused.animals import BLOCKS, build, error, inputs, on_every, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = (*BLOCKS, "loss")


@pytest.fixture(autouse=True)
def exact() -> Any:
    """Matrix products of fp32 in fp32, and no kernel that has fallen back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    assert not dispatch.broken()


def put(name: str, **options: Any) -> Any:
    return build(name, **options).to(DEVICE)


def distance(grads: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Squared, over all gradients."""
    return sum(float((grads[key] - right[key]).square().sum()) for key in right)


@on_every
def test_fp32(name: str) -> None:
    batch = inputs(name, device=DEVICE)
    right_loss, right = step(put(name), batch)
    model = hf_zero.optimize(put(name), ALL)
    assert report(model).replaced
    loss, grads = step(model, batch)
    torch.testing.assert_close(loss, right_loss, rtol=1e-5, atol=0)
    worst = max(error(grads, right).items(), key=lambda item: item[1])
    assert worst[1] < 5e-5, worst


@on_every
def test_bf16_is_no_further_from_fp32_than_torchs(name: str) -> None:
    ours = plain = 0.0
    for seed in range(8):
        batch = inputs(name, device=DEVICE, seed=seed)
        kept = {"dtype": torch.bfloat16, "seed": seed}
        right = step(put(name, **kept).float(), batch)[1]
        size = sum(float(grad.square().sum()) for grad in right.values())
        ours += distance(step(hf_zero.optimize(put(name, **kept), BLOCKS), batch)[1], right) / size
        plain += distance(step(put(name, **kept), batch)[1], right) / size
    assert ours**0.5 <= 1.1 * plain**0.5, (ours**0.5, plain**0.5)
