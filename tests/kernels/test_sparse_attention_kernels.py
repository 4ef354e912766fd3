"""Block-sparse attention's kernels, in the checked interpreter, against the dense masked
softmax: outputs, statistics, gradients, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_zero.ops.dispatch import interpreted
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BlockLayout,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    plan,
    reference,
)
from hf_zero.ops.sparse_attention.attention import BACKWARD, FORWARD
from tests.helpers.cells import in_one_item
from tests.helpers.checked_triton import checked_triton

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="for the interpreter; tests/gpu runs the kernels themselves"
)


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    width: int,
    dtype: Any = torch.float32,
    strided: bool = False,
) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output, laid out as by projections, or with gaps
    between heads and a last dimension of stride 1.
    """
    made = []
    for count in (heads, kv_heads, kv_heads, heads):
        x = torch.randn(batch, length, count, width + 8 * strided).to(dtype)
        made.append(x[..., :width].transpose(1, 2))
    return made


def both_ways(
    config: SparsityConfig,
    tensors: list[torch.Tensor],
    causal: bool = False,
    padding: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """o, lse, dq, dk, dv of the kernels, and of the reference in fp32 from the same values."""
    q, k, v, grad = tensors
    compiled = plan.plan_for(
        config.handle, q.shape[2], q.shape[1], q.shape[1] // k.shape[1], causal, q.device
    )
    seed = torch.tensor([1234]) if dropout else None
    rest: Any = (compiled, padding, seed, causal, q.shape[3] ** -0.5, dropout)
    with checked_triton():
        o, lse = FORWARD.launcher()(q, k, v, *rest)
        grads = BACKWARD.launcher()(grad, q, k, v, o, lse, *rest)
    wide = [x.float() for x in tensors]
    true_o, true_lse = reference.forward(*wide[:3], *rest)
    true_grads = reference.backward(wide[3], *wide[:3], true_o, true_lse, *rest)
    return [o, lse, *grads], [true_o, true_lse, *true_grads]


def assert_near(kernel: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name, ours, true in zip(("o", "lse", "dq", "dk", "dv"), kernel, truth):
        finite = true.isfinite()
        assert torch.equal(ours.isfinite(), finite), name
        error = (ours.float() - true)[finite].abs().max().item()
        assert error <= bound * max(1.0, true[finite].abs().max().item()), f"{name}: {error:.1e}"


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lists above the mean are cut, so that sums over parts run at a size of the interpreter's."""
    monkeypatch.setattr(plan, "SHORTEST_SPLIT", 2)
    monkeypatch.setattr(plan, "LONGEST", 1)
    plan.plan_for.cache_clear()
    yield
    plan.plan_for.cache_clear()


Dense, BigBird = DenseSparsityConfig, BigBirdSparsityConfig
WINDOW = {"num_sliding_window_blocks": 1}
TWO = {"num_local_blocks": 2, "num_different_global_patterns": 2}
# layout; batch, heads, key heads, length and width; dtype; causal; gaps between heads; dropout
CASES: dict[str, tuple[SparsityConfig, tuple[int, ...], Any, bool, bool, float]] = {
    "fp16, 40 wide": (Dense(2, 64), (1, 2, 2, 100, 40), torch.float16, False, True, 0.0),
    "32, causal": (BigBird(2, 32, **WINDOW), (1, 2, 2, 100, 16), torch.float32, True, False, 0.0),
    "shared keys, layouts of their own": (
        FixedSparsityConfig(4, 32, True, **TWO), (1, 4, 2, 100, 16), torch.float32, False, True, 0.0
    ),
    "dropout": (Dense(2, 64), (2, 2, 2, 90, 16), torch.float32, False, False, 0.3),
}  # fmt: skip


@in_one_item(CASES)
def test_kernels_are_the_dense_masked_softmax(name: str) -> None:
    config, sizes, dtype, causal, strided, dropout = CASES[name]
    tensors, padding = inputs(*sizes, dtype=dtype, strided=strided), None
    if dropout:
        padding = torch.ones(sizes[0], sizes[3], dtype=torch.bool)
        padding[1, 70:] = False
    told = {"causal": causal, "padding": padding, "dropout": dropout}
    assert_near(*both_ways(config, tensors, **told), dtype)


def test_global_rows_and_columns_are_cut_into_parts(short_splits: None) -> None:
    config = BigBirdSparsityConfig(2, 64, True, num_random_blocks=1, **WINDOW)
    compiled = plan.plan_for(config.handle, 270, 2, 2, False, torch.device("cpu"))
    assert compiled.per_head and compiled.rows.slots and compiled.columns.slots
    assert_near(*both_ways(config, inputs(1, 2, 1, 270, 16)), torch.float32)


def test_padding_rows_without_keys_and_columns_without_rows() -> None:
    layout = torch.tensor([[[1, 0, 1], [0, 0, 0], [1, 0, 0]]])
    padding = torch.ones(2, 180, dtype=torch.bool)
    padding[0, 100:], padding[1, :70] = False, False
    tensors = inputs(2, 2, 1, 180, 16)
    kernel, truth = both_ways(BlockLayout(layout, 64), tensors, padding=padding)
    assert_near(kernel, truth, torch.float32)
    o, lse, dq, dk, _ = kernel
    assert not o[:, :, 64:128].any() and not dq[:, :, 64:128].any() and not dk[:, :, 64:128].any()
    assert (lse[:, :, 64:128] == torch.inf).all(), "a row without keys has no probabilities"
