"""What is fixed of a flat buffer for the life of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from hf_zero.distributed.codec import Codec
from hf_zero.distributed.flat_mesh import FlatMesh
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.sharding import WHOLE, Sharding


@dataclass(frozen=True, eq=False)
class FlatSpec:
    """Name, layout and kind of one flat buffer.

    number: its place among the flat buffers of its engine. raw: its bytes can be read by their
    module alone and are never cast. sharded: its values are gathered and released. persistent: they
    are not, at a stage that does so with others. writes: of the ranks that own the same elements,
    this one writes them into checkpoints. owned: the elements ``[start, stop)`` of the buffer that
    this rank owns. reduce_codec, gather_codec: how its gradient travels in a reduce-scatter, and
    its values in an all-gather of shards, or of what a step has updated; None: as they are.
    momentum_blocks: how its momentum travels, if its optimizer sends that. mesh: the ranks that
    hold its values. sharding: what is said of its parameters' ranks, without their boxes.
    """

    number: int
    key: str
    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    raw: bool
    sharded: bool
    writes: bool
    owned: tuple[int, int]
    persistent: bool = False
    reduce_codec: Codec | None = None
    gather_codec: Codec | None = None
    momentum_blocks: SignBlocks | None = None
    mesh: FlatMesh | None = None
    sharding: Sharding = WHOLE

    @property
    def owned_numel(self) -> int:
        """How many elements this rank owns."""
        return self.owned[1] - self.owned[0]

    @cached_property
    def sends_differences(self) -> bool:
        """Whether a step sends what its values are to be changed by: the master weights then are
        others than these values, whatever the dtype.
        """
        return self.gather_codec is not None and self.gather_codec.differences

    def own_range(self, name: str) -> tuple[int, int, int]:
        """Where this rank's part of parameter ``name`` lies: (first element of the parameter, start
        in owned, stop in owned); zeros where it has none.
        """
        slot = self.layout.by_name[name]
        start, stop = max(slot.offset, self.owned[0]), min(slot.end, self.owned[1])
        if start >= stop:
            return 0, 0, 0
        return start - slot.offset, start - self.owned[0], stop - self.owned[0]


def reading(path: str) -> Any:
    """A read-only property that is the attribute at ``path``, such as ``spec.key``: a lookup
    without a Python frame.
    """
    return property(attrgetter(path))
