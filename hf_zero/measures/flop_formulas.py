"""Floating-point operations of this package's operators with matrix products, which torch's counter
does not know: those of the products that they stand for. A multiplication and an addition are two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Shape = Sequence[int]


def formulas() -> Mapping[Any, Callable[..., int]]:
    """Return the formulas by operator, for ``FlopCounterMode(custom_mapping=…)``. They take the
    arguments of the operator, with shapes in the place of tensors.
    """
    # what registers the operators
    import hf_zero.ops.linear_cross_entropy
    import hf_zero.ops.packed_linear
    import hf_zero.ops.sparse_attention  # noqa: F401

    operators = torch.ops.hf_zero
    return {
        operators.packed_linear: _packed_linear,
        operators.packed_linear_backward: _packed_linear_backward,
        operators.linear_cross_entropy: _head,
        operators.linear_log_probs: _head,
        operators.linear_log_probs_backward: _log_probs_backward,
        operators.sparse_attention: _sparse_attention,
        operators.sparse_attention_backward: _sparse_attention_backward,
    }


def _packed_linear(x: Shape, *unused: object, out_shape: Shape, **named: object) -> int:
    return 2 * math.prod(out_shape) * x[-1]


def _packed_linear_backward(
    dy: Shape,
    x: Shape,
    weights: object,
    x_trains: bool,
    weights_train: bool,
    *unused: object,
    **named: object,
) -> int:
    return (x_trains + weights_train) * 2 * math.prod(dy) * x[-1]


def _head(hidden: Shape, weight: Shape, *unused: object, **named: object) -> int:
    """Return the operations of the logits. Those of the gradients, which the cross-entropy computes
    beside them, belong to the backward, where no operator shows them.
    """
    return 2 * hidden[0] * math.prod(weight)


def _log_probs_backward(
    grad: Shape, hidden: Shape, weight: Shape, *arguments: Any, **named: object
) -> int:
    for_hidden, for_weight, _ = arguments[-3:]
    return (1 + for_hidden + for_weight) * _head(hidden, weight)


def _sparse_attention(
    q: Shape,
    k: Shape,
    v: Shape,
    padding: object,
    seed: object,
    handle: int,
    causal: bool,
    *unused: object,
    **named: object,
) -> int:
    return 2 * _attended_product(q, handle, causal)


def _sparse_attention_backward(
    grad: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    o: Shape,
    lse: Shape,
    padding: object,
    seed: object,
    handle: int,
    causal: bool,
    *unused: object,
    **named: object,
) -> int:
    return 5 * _attended_product(q, handle, causal)


def _attended_product(q: Shape, handle: int, causal: bool) -> int:
    """Return the operations of one product over the blocks that are attended to."""
    from hf_zero.ops.sparse_attention.sparsity_config import config_of

    batch, heads, length, width = q
    config = config_of(handle)
    count = -(-length // config.block)
    layout = config.make_layout(count * config.block).cpu() != 0
    if causal:
        layout = layout.tril()
    sizes = torch.full((count,), config.block, device="cpu")
    sizes[-1] = length - (count - 1) * config.block
    pairs = int((layout * sizes[:, None] * sizes).sum()) * heads // layout.shape[0]
    return 2 * batch * pairs * width
