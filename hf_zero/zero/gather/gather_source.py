"""The interface of memory besides the shards of all ranks from which a unit can be gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_zero.distributed.collectives import GatherCodec, MeshDim


class GatherRequest(NamedTuple):
    """One call of :meth:`MeshDim.all_gather`: ``(full, shard)`` of each flat buffer, and their
    codecs. It is issued as one collective per flat buffer and counted as one.
    """

    dim: MeshDim
    key: str
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    codecs: Sequence[GatherCodec | None] = ()


class GatherSource(ABC):
    """Memory with the values that a gather of one unit would bring. Must choose the same on every
    rank.
    """

    @abstractmethod
    def awaits_values(self) -> bool:
        """Return whether a gather in flight brings the values that :meth:`keep` will take."""

    @abstractmethod
    def request(self, exact: bool, backward: bool) -> GatherRequest | None:
        """Return the request of one gather, arguments as for :meth:`Unit.launch_gather`; None if
        the shards of all ranks are gathered.
        """

    @abstractmethod
    def keep(self) -> None:
        """Keep gathered values for a later gather, before modules or scripts change them."""

    @abstractmethod
    def forget(self) -> None:
        """Mark kept values as stale. Called when a forward begins."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes that this rank keeps besides its shards."""

    @abstractmethod
    def free(self) -> None:
        """Free what :meth:`nbytes` counts."""
