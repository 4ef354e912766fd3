"""Block-sparse attention's kernels on a GPU: against the reference at middling sizes, against
given rows at 16k tokens, in a model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    plan,
    reference,
    sparse_attention,
)
from hf_zero.ops.sparse_attention.attention import BACKWARD, FORWARD

DEVICE = torch.device("cuda")
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Any:
    yield
    assert not [name for name in dispatch.broken() if name.startswith("sparse_attention")], (
        dispatch.broken()
    )


def inputs(
    batch: int, heads: int, kv_heads: int, length: int, width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, as projections lie in memory."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(batch, length, count, width, device=DEVICE).to(dtype).transpose(1, 2)
        for count in counts
    ]


BigBird, HEADS = BigBirdSparsityConfig, {"different_layout_per_head": True}
PATTERNS = {"num_different_global_patterns": 4, "attention": "unidirectional"}
# layout, causal, tokens that fill no block, dropout
LAYOUTS: dict[str, tuple[SparsityConfig, bool, int, float]] = {
    "bigbird": (BigBird(8, 64, num_random_blocks=3), False, 0, 0.0),
    "bigbird-heads": (BigBird(8, 64, num_random_blocks=3, **HEADS), True, 17, 0.0),
    "blocks-128-dropout": (BigBird(8, 128, num_random_blocks=1), False, 64, 0.1),
    "fixed-32-dropout": (FixedSparsityConfig(8, 32, True, **PATTERNS), True, 5, 0.1),
    "window-16": (LocalSlidingWindowSparsityConfig(8, 16), True, 1, 0.0),
    "dense": (DenseSparsityConfig(8, 64), False, 0, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("name", LAYOUTS)
def test_kernels_against_the_reference(name: str, width: int, dtype: torch.dtype) -> None:
    config, causal, ragged, dropout = LAYOUTS[name]
    if dtype == torch.float32 and width > 128:
        pytest.skip("fp32 tiles of 256 do not fit shared memory; the reference runs")
    length = 2048 + ragged
    q, k, v, grad = inputs(2, 8, 4, length, width, dtype)
    padding = torch.ones(2, length, dtype=torch.bool, device=DEVICE)
    padding[1, length - 300 :] = False
    seed = torch.tensor([99], device=DEVICE) if dropout else None
    compiled = plan.plan_for(config.handle, length, 8, 2, causal, DEVICE)
    rest: Any = (compiled, padding, seed, causal, width**-0.5, dropout)
    o, lse = FORWARD.launcher()(q, k, v, *rest)
    ours = [o, lse, *BACKWARD.launcher()(grad, q, k, v, o, lse, *rest)]
    again = BACKWARD.launcher()(grad, q, k, v, o, lse, *rest)
    assert all(torch.equal(a, b) for a, b in zip(ours[2:], again)), "other bits the second time"
    wide = [x.float() for x in (q, k, v, grad)]
    true_o, true_lse = reference.forward(*wide[:3], *rest)
    truth = [true_o, true_lse, *reference.backward(wide[3], *wide[:3], true_o, true_lse, *rest)]
    for name, mine, true in zip(("o", "lse", "dq", "dk", "dv"), ours, truth):
        finite = true.isfinite()
        assert torch.equal(mine.isfinite(), finite), name
        error = (mine.float() - true)[finite].abs().max().item()
        limit = BOUND[dtype] * max(1.0, true[finite].abs().max().item())
        assert error <= limit, f"{name}: {error:.1e}"


def test_rounding_is_no_worse_than_flash_attentions() -> None:
    q, k, v, grad = inputs(1, 8, 8, 2048, 64, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    true = torch.nn.functional.scaled_dot_product_attention(*wide)
    truth = [true, *torch.autograd.grad(true, wide, grad.double())]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        flash = torch.nn.functional.scaled_dot_product_attention(*leaves)
        flashes = [flash, *torch.autograd.grad(flash, leaves, grad)]
    ours = sparse_attention(*leaves, DenseSparsityConfig(8, 64))
    mine = [ours, *torch.autograd.grad(ours, leaves, grad)]
    for name, a, b, t in zip(("o", "dq", "dk", "dv"), mine, flashes, truth):
        error, flash_error = ((x.double() - t).pow(2).mean().sqrt().item() for x in (a, b))
        assert error <= 1.1 * flash_error + 1e-7, (name, error, flash_error)


def test_rows_at_16k_tokens() -> None:
    """Chosen rows of the output, and of dk, computed alone in fp64."""
    length, config = 16_384, BigBirdSparsityConfig(16, 64, num_random_blocks=3)
    leaves = [x.requires_grad_() for x in inputs(1, 16, 16, length, 64, torch.bfloat16)[:3]]
    out = sparse_attention(*leaves, config)
    q, k, v = (x.detach().double() for x in leaves)
    mask = config.make_layout(length)[0].bool().repeat_interleave(64, 1).to(DEVICE)  # [blocks, S]
    for row in (0, 63, 64, 5000, length - 1):
        scores = (k @ q[:, :, row, :, None]).squeeze(-1) / 8  # [1, heads, S]
        p = scores.masked_fill(~mask[row // 64], -torch.inf).softmax(-1)
        expected = (p[..., None] * v).sum(2)
        torch.testing.assert_close(out[:, :, row].double(), expected, atol=4e-3, rtol=2e-2)
    grad = torch.zeros_like(out)
    grad[:, :, 5000] = 1.0  # one row's gradient: dv is that row's probabilities
    (dv,) = torch.autograd.grad(out, leaves[2], grad)
    scores = (k @ q[:, :, 5000, :, None]).squeeze(-1) / 8
    p = scores.masked_fill(~mask[5000 // 64], -torch.inf).softmax(-1)
    torch.testing.assert_close(dv.double(), p[..., None].expand_as(dv), atol=2e-3, rtol=2e-2)


def test_a_model_trains_without_synchronizing() -> None:
    import transformers as hf

    from hf_zero.integrations.fused.sparse_attention import sparsify

    sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 64}
    config = hf.BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    config.max_position_embeddings = 1024
    model = hf.BertForMaskedLM(config).to(DEVICE, torch.bfloat16).train()
    sparsify(model, BigBirdSparsityConfig(2, 64))
    ids = torch.randint(0, 64, (2, 1000), device=DEVICE)
    model(input_ids=ids, labels=ids).loss.backward()
    q = torch.randn(2, 2, 1000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    layout = BigBirdSparsityConfig(2, 64)
    sparse_attention(q, q, q, layout, dropout=0.1).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse_attention(q, q, q, layout, dropout=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
