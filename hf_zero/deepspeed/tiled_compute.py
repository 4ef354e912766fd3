"""Tiled computation over long sequences: a function runs on one stretch of the sequence after
another, and once more in the backward, so that what it keeps for that is of one stretch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_zero.errors import ConfigError

Compute = Callable[..., torch.Tensor]
Weights = Sequence[torch.Tensor] | None
"""Accepted and not needed: a unit's gradients are reduced when its last backward is over."""


def sequence_tiled_compute(
    fn: Compute,
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Weights = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """``fn(**stretches, **kwargs_to_pass)`` on each of ``shards`` stretches of the tensors
    ``kwargs_to_shard`` [batch, seqlen, ...], put together along ``output_unshard_dimension``; 0:
    outputs are scalars, which become one vector. ``output_reduction``: of what was put together,
    "mean", "sum" or None. Raises ConfigError for another one.
    """
    step = math.ceil(seqlen / shards)
    stretches = [
        {key: value[:, start : start + step] for key, value in kwargs_to_shard.items()}
        for start in range(0, seqlen, step)
    ]
    parts = [_recomputed(fn, **stretch, **kwargs_to_pass) for stretch in stretches]
    whole = torch.stack(parts) if output_unshard_dimension == 0 else torch.cat(parts, dim=1)
    return whole if output_reduction is None else _reduced(whole, output_reduction)


class SequenceTiledCompute:
    """:func:`sequence_tiled_compute` with keys and values apart."""

    @staticmethod
    def apply(
        fn: Compute,
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Weights,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :])),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """The forward of an MLP in stretches."""

    @staticmethod
    def apply(
        fn: Compute, module: Any, x: torch.Tensor, shards: int, compute_params: Weights = None
    ) -> torch.Tensor:
        """``fn(module, x)`` for ``x`` [..., seqlen, hidden], in ``shards`` stretches."""
        parts = [_recomputed(fn, module, part) for part in x.chunk(shards, dim=-2)]
        return torch.cat(parts, dim=-2)


class AutogradComputeMLP:
    """The forward of an MLP, whose activations are computed again in the backward."""

    @staticmethod
    def apply(fn: Compute, module: Any, x: torch.Tensor) -> torch.Tensor:
        return _recomputed(fn, module, x)


class TiledFusedLogitsLoss:
    """A loss in stretches: the logits of one stretch at a time."""

    @staticmethod
    def apply(
        fn: Compute,
        module: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Weights,
        output_reduction: str,
    ) -> torch.Tensor:
        """The mean or sum over ``shards`` stretches of the scalars ``fn(module, x, y[, mask])``.

        x: [batch, seqlen, hidden], y: [batch, seqlen, ...], mask: [batch, seqlen] or None;
        stretches are [tokens, ...]. Raises ConfigError for other shapes or another reduction.
        """
        given = [x, y] if mask is None else [x, y, mask]
        for name, tensor in zip(("x", "y", "mask"), given):
            if tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2]:
                raise ConfigError(
                    f"{name} has the shape {tuple(tensor.shape)}; pass x, y and mask with the same "
                    "batch and sequence length before other dimensions"
                )
        stretches = zip(*(tensor.flatten(0, 1).chunk(shards) for tensor in given))
        parts = [_recomputed(fn, module, *stretch) for stretch in stretches]
        return _reduced(torch.stack(parts), output_reduction)


def _recomputed(fn: Compute, *args: Any, **kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = checkpoint(fn, *args, use_reentrant=False, **kwargs)
    return found


def _reduced(values: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"unknown output_reduction {reduction!r}; write 'mean' or 'sum'")
    return values.mean() if reduction == "mean" else values.sum()
