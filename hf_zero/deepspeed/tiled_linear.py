"""``deepspeed.zero.TiledLinear``: a linear layer of several small ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hf_zero.distributed.parallel_dims import check_size
from hf_zero.errors import PartitionError
from hf_zero.parallel.pipeline.stage_bounds import partition_uniform


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
        PartitionError: more tiles than features, or none; in the forward, another number of tensors
            than ``in_splits``.
        ConfigError: no number of features.
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
        **kwargs: object,
    ) -> None:
        super().__init__()
        for side, splits, features in (
            ("in", in_splits, in_features),
            ("out", out_splits, out_features),
        ):
            check_size(features, f"{side}_features", "features")
            if splits not in range(1, features + 1):
                raise PartitionError(
                    f"TiledLinear: {side}_splits is {splits!r}; write 1 to {features}"
                )
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

    def forward(self, input_: Any) -> object:
        splits = self.in_splits > 1 and not self.input_is_already_split
        if isinstance(input_, torch.Tensor) and (splits or self.in_splits == 1):
            inputs: Sequence[object] = torch.split(input_, _sizes(self.in_parts), dim=-1)
        else:
            inputs = input_
        if len(inputs) != self.in_splits:
            raise PartitionError(
                f"TiledLinear got {len(inputs)} inputs; pass in_splits = {self.in_splits}"
            )
        rows: list[object] = []
        for row in self.linears:
            total: object = None
            for part, tile in zip(inputs, row, strict=True):  # type: ignore[call-overload]
                total = self._reduce_local_output(total, tile(part))
            rows.append(total)
        return self._combine_output_splits(rows) if self.combine_out_splits else rows

    def _reduce_local_output(self, total: Any, new: Any) -> Any:
        """Return the sum of a row's tiles so far; the first is cloned."""
        return new.clone() if total is None else total + new

    def _combine_output_splits(self, rows: Sequence[Any]) -> torch.Tensor:
        return torch.cat(list(rows), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take the values of the layer ``other`` of the same size (collective at stage 3)."""
        from hf_zero.zero.access.gathered_parameters import GatheredParameters

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
