"""Tiled computation over long sequences: a function runs on one tile of the sequence after another,
and again in the backward, which thus keeps the activations of only one tile.
``deepspeed.zero.TiledLinear``: a linear layer of several small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parallel.pipeline.partition import partition_uniform

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
    """Run ``fn(**tile, **kwargs_to_pass)`` on each of ``shards`` tiles of the tensors
    ``kwargs_to_shard`` [batch, seqlen, ...]; return the outputs joined along
    ``output_unshard_dimension``; 0: outputs are scalars, joined to one vector. ``output_reduction``
    of the joined output: "mean", "sum" or None. Raises ConfigError for another one.
    """
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
    """:func:`sequence_tiled_compute` with separate keys and values."""

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
    """The forward of an MLP in tiles."""

    @staticmethod
    def apply(
        fn: Compute, module: Any, x: torch.Tensor, shards: int, compute_params: Weights = None
    ) -> torch.Tensor:
        """Compute ``fn(module, x)`` for ``x`` [..., seqlen, hidden] in ``shards`` tiles."""
        parts = [_recomputed(fn, module, part) for part in x.chunk(shards, dim=-2)]
        return torch.cat(parts, dim=-2)


class TiledFusedLogitsLoss:
    """A loss in tiles: the logits of one tile at a time."""

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
        """Return the mean or sum over ``shards`` tiles of the scalars ``fn(module, x, y[, mask])``.

        x: [batch, seqlen, hidden], y: [batch, seqlen, ...], mask: [batch, seqlen] or None; tiles
        are [tokens, ...]. Raises ConfigError for other shapes or another reduction.
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


# ---- Tiled linear layers ----


class TiledLinear(nn.Module):
    """``y = x W^T + b`` with W in ``out_splits`` x ``in_splits`` tiles, each a separate module: at
    stage 3 one tile is whole at a time.

    Args:
        in_features, out_features, bias: as in nn.Linear.
        in_splits, out_splits: tiles along each dimension, whose widths differ by one at most.
        input_is_already_split: the input is a list of ``in_splits`` tensors.
        combine_out_splits: False: the output is a list of ``out_splits`` tensors.
        linear_cls: the class of tiles; ``kwargs`` are its further arguments.
        init_linear: a layer whose values are copied.

    Raises:
        PartitionError: more tiles than features, or none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise PartitionError(f"TiledLinear: {name} is {splits}; write 1 to {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        widths, heights = _sizes(self.in_parts), _sizes(self.out_parts)
        # the last tile of each row, which is added last, has the bias
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs)
                for column, width in enumerate(widths)
            )
            for height in heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        if self.in_splits > 1 and not self.input_is_already_split:
            inputs: Any = torch.split(input_, _sizes(self.in_parts), dim=-1)
        else:
            inputs = [input_] if self.in_splits == 1 else input_
        rows: list[Any] = []
        for row in self.linears:
            total: Any = None
            for part, tile in zip(inputs, row, strict=True):  # type: ignore[call-overload]
                total = self._reduce_local_output(total, tile(part))
            rows.append(total)
        return self._combine_output_splits(rows) if self.combine_out_splits else rows

    def _reduce_local_output(self, total: Any, new: Any) -> Any:
        """Return the sum of a row's tiles so far; the first is cloned."""
        return new.clone() if total is None else total + new

    def _combine_output_splits(self, rows: Sequence[Any]) -> Any:
        return torch.cat(list(rows), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take the values of the layer ``other`` of the same size (collective at stage 3)."""
        from hf_zero.zero.access.full import GatheredParameters

        for name, mine, its in (
            ("in_features", self.in_features, other.in_features),
            ("out_features", self.out_features, other.out_features),
            ("bias", self.use_bias, other.bias is not None),
        ):
            if mine != its:
                raise PartitionError(f"TiledLinear: {name} is {mine} here and {its} in the other")
        with GatheredParameters([*self.parameters(), *other.parameters()], modifier_rank=0):
            for row, first, stop in zip(self.linears, self.out_parts, self.out_parts[1:]):
                tiles: list[Any] = list(row)  # type: ignore[arg-type, call-overload]
                for column, tile in enumerate(tiles):
                    begin, end = self.in_parts[column : column + 2]
                    tile.weight.copy_(other.weight[first:stop, begin:end])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[first:stop])


class TiledLinearReturnBias(TiledLinear):
    """A TiledLinear whose tiles, like itself, return (output, bias), as Megatron's do."""

    def _reduce_local_output(self, total: Any, new: Any) -> Any:
        output, bias = new if isinstance(new, tuple) else (new, None)
        if total is None:
            return output.clone(), None if bias is None else bias.clone()
        return total[0] + output, total[1] if bias is None else (
            bias.clone() if total[1] is None else total[1] + bias
        )

    def _combine_output_splits(self, rows: Sequence[Any]) -> Any:
        biases = [bias for _, bias in rows]
        return (
            torch.cat([output for output, _ in rows], dim=-1),
            None if biases[0] is None else torch.cat(biases, dim=-1),
        )


def _sizes(parts: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(parts)]
