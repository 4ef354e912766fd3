"""The properties of a flat buffer that are fixed for the life of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from hf_zero.distributed.collectives import Codec, GatherCodec
from hf_zero.distributed.flat_mesh import FlatMesh
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.sharding import WHOLE, Sharding


class MomentumBlocks(Protocol):
    """The form of messages of a momentum: ``block`` elements of a tensor share a scale."""

    @property
    def block(self) -> int: ...


@dataclass(frozen=True, eq=False)
class FlatSpec:
    """Name, layout and kind of one flat buffer.

    index: among the flat buffers of its engine. raw: only their own module can read the bytes,
    which are never cast. sharded: its values are gathered and released. persistent: they stay whole
    at a ZeRO stage that shards others. outside: no module of the model has its parameters.
    saves_shard: whether this rank is the replica that saves this shard. owned: the elements
    ``[start, stop)`` of the buffer that this rank owns.
    reduce_codec, gather_codec: codec of its gradient in a reduce-scatter, and of its values in an
    all-gather of shards or of a step's updates; None: uncompressed. momentum_blocks: codec of its
    momentum, if the optimizer sends that. mesh: the ranks that hold its values. sharding: the
    ``Sharding`` of its parameters, without their boxes. master_dtype: dtype of its master weights
    and of sums of its gradients.
    """

    index: int
    key: str
    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    raw: bool
    sharded: bool
    saves_shard: bool
    owned: tuple[int, int]
    persistent: bool = False
    outside: bool = False
    reduce_codec: Codec | None = None
    gather_codec: GatherCodec | None = None
    momentum_blocks: MomentumBlocks | None = None
    mesh: FlatMesh | None = None
    sharding: Sharding = WHOLE
    master_dtype: torch.dtype = torch.float32

    @property
    def owned_numel(self) -> int:
        """Number of elements that this rank owns."""
        return self.owned[1] - self.owned[0]

    @cached_property
    def sends_differences(self) -> bool:
        """Return whether a step sends the changes of its values. Master weights then differ from
        these values in every dtype.
        """
        return self.gather_codec is not None and self.gather_codec.differences

    @property
    def needs_master(self) -> bool:
        """Return whether an update on the device needs master weights besides the parameter shard,
        even if that is on the device, too.
        """
        return self.dtype != self.master_dtype or self.sends_differences

    def own_range(self, name: str) -> tuple[int, int, int]:
        """Return the range of this rank's part of parameter ``name``: (first element of the
        parameter, start in owned, stop in owned); zeros if it has none.
        """
        slot = self.layout.by_name[name]
        start, stop = max(slot.offset, self.owned[0]), min(slot.end, self.owned[1])
        if start >= stop:
            return 0, 0, 0
        return start - slot.offset, start - self.owned[0], stop - self.owned[0]
