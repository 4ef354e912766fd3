"""sparse_attention as torch sees it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.device import graphs
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BlockLayout,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    sparse_attention,
)
from hf_zero.ops.sparse_attention.plan import plan_for


@pytest.fixture(autouse=True)
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


def qkv(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    length: int = 70,
    width: int = 16,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(batch, count, length, width, requires_grad=True, **more)
        for count in (heads, kv_heads, kv_heads)
    )


def test_a_dense_layout_is_attention() -> None:
    for causal in (False, True):
        q, k, v = qkv(2, 4, 2, 100)
        ours = sparse_attention(q, k, v, DenseSparsityConfig(4), causal=causal, scale=0.3)
        torchs = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=0.3, enable_gqa=True
        )
        grad = torch.randn_like(ours)
        found = [(x, *torch.autograd.grad(x, (q, k, v), grad)) for x in (ours, torchs)]
        for mine, theirs in zip(*found):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_gradients_are_derivatives() -> None:
    q, k, v = qkv(1, 2, 1, 18, 2, dtype=torch.float64)
    config = LocalSlidingWindowSparsityConfig(2, 16)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return sparse_attention(*given, config, dropout=0.2)

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


class Diagonal(SparsityConfig):
    def make_layout(self, seq_len: int) -> torch.Tensor:
        return torch.eye(seq_len // self.block, dtype=torch.int64).repeat(self.num_heads, 1, 1)


def test_empty_inputs_give_empty_outputs() -> None:
    q, k, v = qkv(batch=0)
    out = sparse_attention(q, k, v, DenseSparsityConfig(2))
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape
    q, k, v = qkv(width=0)
    out = sparse_attention(q, k, v, DenseSparsityConfig(2))
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape
    q, k, v = qkv(batch=0)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(q, k.bfloat16(), v, DenseSparsityConfig(2))
        assert out.dtype == torch.bfloat16


def test_layouts_of_every_kind() -> None:
    """Causal within its blocks, a tensor, a subclass's own; a plan is made once for equal ones."""
    q, k, v = qkv(length=64)
    config = FixedSparsityConfig(2, attention="unidirectional")
    out = sparse_attention(q, k, v, config)
    assert torch.equal(out, sparse_attention(q, k, v, config, causal=True))
    changed = v.detach().clone()
    changed[:, :, 40:] = 9
    assert torch.equal(out[:, :, :40], sparse_attention(q, k, changed, config)[:, :, :40])

    out = sparse_attention(q, k, v, Diagonal(2, 16))
    half = sparse_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16], DenseSparsityConfig(2, 16))
    torch.testing.assert_close(out[:, :, :16], half)

    q, k, v = qkv(length=100)
    layout = torch.tensor([[[1, 0], [1, 1]], [[1, 1], [0, 1]]])
    expected = sparse_attention(q, k, v, BlockLayout(layout, 64))
    assert torch.equal(sparse_attention(q, k, v, layout), expected)
    layout[0, 0, 1] = 1
    again = sparse_attention(q, k, v, layout)
    assert not torch.equal(again, expected), "written to since it was compiled"

    sparse_attention(q, k, v, BigBirdSparsityConfig(2, seed=3))
    before = plan_for.cache_info().misses
    sparse_attention(q, k, v, copy.deepcopy(BigBirdSparsityConfig(2, seed=3)))
    assert plan_for.cache_info().misses == before
    sparse_attention(q, k, v, BigBirdSparsityConfig(2, seed=4))
    assert plan_for.cache_info().misses == before + 1


def test_a_tensor_is_a_layout_for_each_length() -> None:
    """Of 8 blocks of 16 or of 32 tokens; inference tensors, whose writes torch does not count, are
    read each time.
    """
    with torch.inference_mode():
        unwatched = torch.ones(1, 8, 8)
    for layout in (torch.ones(1, 8, 8), unwatched):
        for length in (128, 250, 120, 128):
            q, k, v = qkv(length=length)
            ours = sparse_attention(q, k, v, layout)
            torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
        with torch.inference_mode():
            layout[:, 1:, 0] = 0
        after = sparse_attention(q, k, v, layout)
        assert torch.equal(after[:, :, :16], ours[:, :, :16]) and not torch.equal(after, ours)


def test_a_graph_holds_the_plan_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays do not look the plan up, so the cache may drop it."""
    graph = SimpleNamespace(held=[])
    q, k, v = qkv()
    config = DenseSparsityConfig(2)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_captured", graph)
        sparse_attention(q, k, v, config)
    plan = plan_for(config.handle, 70, 2, 1, False, q.device)
    held = {id(tensor) for tensor in graph.held}
    for lists in (plan.rows, plan.columns):
        assert {id(lists.items), id(lists.index), id(lists.bits), id(lists.splits)} <= held
