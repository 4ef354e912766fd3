"""sparse_attention as torch sees it: an operator with gradients that compiles, counts what it is
given, and names what it cannot take.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_zero.errors import KernelError
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
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(batch, count, length, width, requires_grad=True, **kwargs)
        for count in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_dense_layout_is_attention(causal: bool) -> None:
    q, k, v = qkv(2, 4, 2, 100)
    ours = sparse_attention(q, k, v, DenseSparsityConfig(4), causal=causal, scale=0.3)
    torchs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(torchs, (q, k, v), grad)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_derivatives(dropout: float) -> None:
    q, k, v = qkv(1, 2, 1, 20, 4, dtype=torch.float64)
    config = LocalSlidingWindowSparsityConfig(2, 16)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return sparse_attention(*given, config, dropout=dropout)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_the_operator_keeps_torchs_rules() -> None:
    handle = FixedSparsityConfig(2).handle
    padding, seed = torch.ones(1, 70, dtype=torch.bool), torch.tensor([3])
    for p, s in ((None, None), (padding, seed)):
        torch.library.opcheck(
            torch.ops.hf_zero.sparse_attention.default,
            (*qkv(), p, s, handle, True, 0.25, 0.1 if s is not None else 0.0),
        )


def test_it_compiles_whole() -> None:
    config = BigBirdSparsityConfig(2, 16, attention="unidirectional")
    q, k, v = qkv()

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return sparse_attention(*given, config) * 2

    torch.testing.assert_close(
        torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)
    )


def test_a_unidirectional_configuration_is_causal_within_its_blocks() -> None:
    q, k, v = qkv(length=64)
    config = FixedSparsityConfig(2, attention="unidirectional")
    assert torch.equal(
        sparse_attention(q, k, v, config), sparse_attention(q, k, v, config, causal=True)
    )
    changed = v.detach().clone()
    changed[:, :, 40:] = 9
    assert torch.equal(
        sparse_attention(q, k, v, config)[:, :, :40],
        sparse_attention(q, k, changed, config)[:, :, :40],
    )


def test_a_layout_can_be_a_tensor() -> None:
    q, k, v = qkv(length=100)
    layout = torch.tensor([[[1, 0], [1, 1]], [[1, 1], [0, 1]]])
    expected = sparse_attention(q, k, v, BlockLayout(layout, 64))
    assert torch.equal(sparse_attention(q, k, v, layout), expected)
    layout[0, 0, 1] = 1
    assert not torch.equal(sparse_attention(q, k, v, layout), expected), (
        "written to since it was compiled"
    )


def test_a_plan_is_made_once_for_equal_configurations() -> None:
    q, k, v = qkv()
    sparse_attention(q, k, v, BigBirdSparsityConfig(2, seed=3))
    before = plan_for.cache_info().misses
    sparse_attention(q, k, v, copy.deepcopy(BigBirdSparsityConfig(2, seed=3)))
    assert plan_for.cache_info().misses == before
    sparse_attention(q, k, v, BigBirdSparsityConfig(2, seed=4))
    assert plan_for.cache_info().misses == before + 1


def test_a_subclass_brings_its_own_layout() -> None:
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len: int) -> torch.Tensor:
            return torch.eye(seq_len // self.block, dtype=torch.int64).repeat(self.num_heads, 1, 1)

    q, k, v = qkv(length=32)
    out = sparse_attention(q, k, v, Diagonal(2, 16))
    half = sparse_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16], DenseSparsityConfig(2, 16))
    torch.testing.assert_close(out[:, :, :16], half)


def test_empty_inputs_give_empty_outputs() -> None:
    for shape in ({"batch": 0}, {"length": 0}):
        q, k, v = qkv(**shape)
        out = sparse_attention(q, k, v, DenseSparsityConfig(2))
        assert out.shape == q.shape
        out.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


def test_autocast_decides_the_dtype() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse_attention(q, k.bfloat16(), v, DenseSparsityConfig(2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": torch.ones(1, 2, 60, 16)}, "self-attention"),
        ({"q": torch.ones(1, 3, 70, 16)}, "cannot share"),
        ({"q": torch.ones(1, 2, 70, 16).half()}, "one floating dtype"),
        ({"q": torch.ones(1, 2, 70, 16, device="meta")}, "one device"),
        ({"dropout": 1.0}, "below 1"),
        ({"key_padding_mask": torch.ones(1, 1, 70, 70)}, "key_padding_mask"),
        ({"layout": torch.ones(1, 4, 4)}, "fits 70 tokens with no block"),
        ({"layout": torch.ones(3, 3)}, "has the shape"),
        ({"layout": BlockLayout(torch.ones(1, 3, 3), 16)}, "the layout has 3 blocks of 16"),
        ({"layout": DenseSparsityConfig(2, block=24)}, "blocks of 16, 32, 64 or a multiple"),
        (
            {
                "layout": FixedSparsityConfig(
                    4, different_layout_per_head=True, num_different_global_patterns=4
                )
            },
            "num_heads=2",
        ),
    ],
)
def test_what_it_cannot_take_is_named(changed: dict[str, Any], said: str) -> None:
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v, "layout": DenseSparsityConfig(2), **changed}
    with pytest.raises(KernelError, match=said):
        sparse_attention(
            given.pop("q"), given.pop("k"), given.pop("v"), given.pop("layout"), **given
        )


def test_wide_heads_are_refused() -> None:
    q, k, v = qkv(width=264)
    with pytest.raises(KernelError, match="at most 256"):
        sparse_attention(q, k, v, DenseSparsityConfig(2))
