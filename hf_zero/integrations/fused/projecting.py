"""Fusion of several projections of one input into one GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_zero.integrations.fused.conditions import plain
from hf_zero.ops.packed_linear import packed_linear_whole


def whole(x: torch.Tensor, linears: Sequence[nn.Module]) -> torch.Tensor | None:
    """Return the outputs of all ``linears`` for ``x``, concatenated, from one GEMM; None unless
    each is a plain matrix and bias of x's dtype.
    """
    weights, biases = [], []
    for linear in linears:
        if not plain(linear, nn.Linear) or linear.weight.dtype != x.dtype:
            return None
        weights.append(linear.weight)
        biases.append(linear.bias)
    return packed_linear_whole(x, weights, None if all(bias is None for bias in biases) else biases)
