"""Fused kernels in models on the GPU: loss and gradients against the untouched model, in fp32
and bf16, dropout, checkpointing, an engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.integrations.fused import report
from hf_zero.ops import dispatch
from tests.helpers.engines import start
from tests.integrations.fused.animals import BLOCKS, build, error, inputs, on_every, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = (*BLOCKS, "loss")
LLAMA = {"intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, **LLAMA},
    "bert": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
    "gpt2": {"n_embd": 256, "n_head": 4},
}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(WIDE))
def test_wide_models(name: str, dtype: torch.dtype) -> None:
    """Widths at which kernels take their wide tiles, and a batch of many rows."""
    positions = {"n_positions": 512} if name == "gpt2" else {"max_position_embeddings": 512}
    batch = inputs(name, device=DEVICE, rows=4, tokens=333)
    options = {"dtype": dtype, "initializer_range": 0.05, **WIDE[name], **positions}
    right = step(put(name, **options).float(), batch)[1]
    grads = step(hf_zero.optimize(put(name, **options), ALL), batch)[1]
    plain = step(put(name, **options), batch)[1]
    squared = [distance(found, right) for found in (grads, plain)]
    size = sum(float(grad.square().sum()) for grad in right.values())
    assert squared[0] <= 1.1**2 * squared[1] + 1e-10 * size, (squared, size)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5", "vit"])
def test_checkpointing_replays_the_same_dropout(name: str, reentrant: bool) -> None:
    batch = inputs(name, device=DEVICE)
    models = [hf_zero.optimize(put(name, dropout=True), BLOCKS) for _ in range(2)]
    told = {"use_reentrant": reentrant}
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs=told)
    if reentrant and name != "vit":
        for model in models:
            model.enable_input_require_grads()
    (loss, right), (again, grads) = (step(model, batch) for model in models)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert max(error(grads, right).values()) < 5e-5


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_engine_with_auto_follows_one_without(name: str, stage: int) -> None:
    losses: list[list[float]] = []
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}}
    for kernels in ("off", "auto"):
        torch.manual_seed(0)
        model = put(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        engine = start(model, optimizer, {**config, "kernels": kernels})
        losses.append([])
        for seed in range(4):
            loss = engine(**inputs(name, device=DEVICE, seed=seed)).loss
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.destroy()
    torch.testing.assert_close(
        torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=1e-5
    )
