"""Computation in tiles of the sequence under DeepSpeed's names.

A tiled function runs on one tile after another, and again in the backward, which thus keeps the
activations of only one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_zero.activations.checkpointing import repeatable
from hf_zero.distributed.parallel_dims import check_size
from hf_zero.errors import ConfigError

Compute = Callable[..., torch.Tensor]
Weights = Sequence[torch.Tensor] | None
"""Accepted and not needed: a unit's gradients are reduced when its last backward is over."""


def sequence_tiled_compute(
    fn: Compute,
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, object],
    grad_requiring_tensor_key: str,
    compute_params: Weights = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Run ``fn(**tile, **kwargs_to_pass)`` on each of ``shards`` tiles of the tensors
    ``kwargs_to_shard`` [batch, seqlen, ...]; return the outputs joined along
    ``output_unshard_dimension``; 0: outputs are scalars, joined to one vector. ``output_reduction``
    of the joined output: "mean", "sum" or None. Raises ConfigError for another one, ``shards``
    below 1, and tensors of another length.
    """
    _check(shards, "sum" if output_reduction is None else output_reduction)
    for key, value in kwargs_to_shard.items():
        if value.dim() < 2 or value.shape[1] != seqlen or seqlen < 1:
            raise ConfigError(
                f"{key} has the shape {tuple(value.shape)} and seqlen is {seqlen}; pass tensors "
                "[batch, seqlen, ...] of one token or more"
            )
    step = math.ceil(seqlen / shards)
    stretches = [
        {key: value[:, start : start + step] for key, value in kwargs_to_shard.items()}
        for start in range(0, seqlen, step)
    ]
    parts = [_recomputed(fn, **stretch, **kwargs_to_pass) for stretch in stretches]
    dim = output_unshard_dimension
    whole = torch.stack(parts) if dim == 0 else torch.cat(parts, dim=dim)
    return whole if output_reduction is None else _reduced(whole, output_reduction)


class SequenceTiledCompute:
    """:func:`sequence_tiled_compute` with separate keys and values. Raises ConfigError also for
    another number of values than of keys.
    """

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
        *args: torch.Tensor,
    ) -> torch.Tensor:
        keys = [*keys_to_shard, *keys_to_pass]
        if len(args) != len(keys):
            raise ConfigError(
                f"{len(args)} values for the keys {keys} of keys_to_shard and keys_to_pass; pass "
                "one for each"
            )
        return sequence_tiled_compute(
            fn, seqlen, shards, dict(zip(keys_to_shard, args)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :])), grad_requiring_tensor_key,
            compute_params, output_unshard_dimension, output_reduction,
        )  # fmt: skip


class TiledMLP:
    """The forward of an MLP in tiles."""

    @staticmethod
    def apply(
        fn: Compute, module: object, x: torch.Tensor, shards: int, compute_params: Weights = None
    ) -> torch.Tensor:
        """Compute ``fn(module, x)`` for ``x`` [..., seqlen, hidden] in ``shards`` tiles. Raises
        ConfigError for ``shards`` below 1, and for ``x`` of one dimension.
        """
        _check(shards)
        if x.dim() < 2:
            raise ConfigError(
                f"TiledMLP: x has the shape {tuple(x.shape)}; pass one [..., seqlen, hidden]"
            )
        parts = [_recomputed(fn, module, part) for part in x.chunk(shards, dim=-2)]
        return torch.cat(parts, dim=-2)


class TiledFusedLogitsLoss:
    """A loss in tiles: the logits of one tile at a time."""

    @staticmethod
    def apply(
        fn: Compute,
        module: object,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Weights,
        output_reduction: str,
    ) -> torch.Tensor:
        """Return the mean or sum over ``shards`` tiles of the scalars ``fn(module, x, y[, mask])``.

        x: [batch, seqlen, hidden], y: [batch, seqlen, ...], mask: [batch, seqlen] or None; tiles
        are [tokens, ...]. Raises ConfigError for other shapes, another reduction or ``shards``
        below 1.
        """
        _check(shards, output_reduction)
        arguments = [x, y] if mask is None else [x, y, mask]
        for name, tensor in zip(("x", "y", "mask"), arguments):
            if tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2]:
                raise ConfigError(
                    f"{name} has the shape {tuple(tensor.shape)}; pass x, y and mask with the same "
                    "batch and sequence length before other dimensions"
                )
        stretches = zip(*(tensor.flatten(0, 1).chunk(shards) for tensor in arguments))
        parts = [_recomputed(fn, module, *stretch) for stretch in stretches]
        return _reduced(torch.stack(parts), output_reduction)


def _recomputed(fn: Compute, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``fn(*args, **kwargs)``, computed again in the backward."""

    def call(*values: Any) -> torch.Tensor:
        return fn(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))

    # by position: checkpoint has keywords of its own, and finds the devices of its random states
    # in positional arguments
    output: torch.Tensor = checkpoint(
        repeatable(call), *args, *kwargs.values(), use_reentrant=False
    )
    return output


def _check(shards: int, reduction: str = "sum") -> None:
    check_size(shards, "shards", "tiles")
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"unknown output_reduction {reduction!r}; write 'mean' or 'sum'")


def _reduced(values: torch.Tensor, reduction: str) -> torch.Tensor:
    return values.mean() if reduction == "mean" else values.sum()
