"""Flats without an engine: parameters laid out and cut over imagined ranks, for tests of what
runs on shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER, DeviceStorage
from hf_zero.zero.layout.flat_layout import FlatLayout


@dataclass
class ShardGradient:
    """One rank's part of the gradient of one flat."""

    shard: Tensor | None
    unused: frozenset[str] = frozenset()


@dataclass
class ShardFlat:
    """One rank's chunk of one flat."""

    key: str
    layout: FlatLayout
    owned: tuple[int, int]
    master: Tensor
    gradient: ShardGradient
    trainable: bool = True
    offloaded: bool = False
    tied_pp_stages: tuple[int, ...] = ()

    @property
    def contents(self) -> DeviceStorage:
        return DeviceStorage({MASTER: self.master})

    reading = writing = updating = lambda shard: shard.contents

    member_writes = 0

    def memory_of_members(self) -> Tensor:
        return self.master.data

    def store_master(self, values: Tensor, start: int = 0) -> None:
        self.contents.store(MASTER, start, values)

    def write(self, values: Mapping[str, Tensor], into: Tensor) -> None:
        """Copy this chunk's elements of whole tensors into ``into`` (1-D over ``owned``)."""
        for piece in self.layout.pieces(*self.owned):
            at = piece.offset - self.owned[0]
            into[at : at + len(piece)] = (
                values[piece.name].reshape(-1)[piece.start : piece.stop].to(into.dtype)
            )

    def read(self, chunk: Tensor, out: dict[str, Tensor]) -> None:
        """Copy this chunk's elements out of ``chunk`` into whole flat tensors."""
        for piece in self.layout.pieces(*self.owned):
            at = piece.offset - self.owned[0]
            out[piece.name].view(-1)[piece.start : piece.stop] = chunk[at : at + len(piece)]


def shard(
    units: Sequence[Mapping[str, Tensor]],
    shards: int,
    *,
    together: bool,
    grad_dtype: torch.dtype = torch.float32,
) -> list[list[ShardFlat]]:
    """The flats of every rank, with masters filled from the units and gradients zero.

    ``together`` keeps a rank's chunks in one piece of memory, in the order of units; else each has
    its own.
    """
    layouts = [
        FlatLayout.build([(name, tensor.shape) for name, tensor in unit.items()], shards)
        for unit in units
    ]
    ranks = []
    for rank in range(shards):
        chunks = [layout.shard_numel for layout in layouts]
        if together:
            masters = list(torch.zeros(sum(chunks)).split(chunks))
            grads = list(torch.zeros(sum(chunks), dtype=grad_dtype).split(chunks))
        else:
            masters = [torch.zeros(n) for n in chunks]
            grads = [torch.zeros(n, dtype=grad_dtype) for n in chunks]
        flats = []
        for index, (unit, layout) in enumerate(zip(units, layouts)):
            flat = ShardFlat(
                f"unit{index}|trainable|float32",
                layout,
                layout.shard_range(rank),
                masters[index],
                ShardGradient(grads[index]),
            )
            flat.write(unit, flat.master)
            flats.append(flat)
        ranks.append(flats)
    return ranks
