"""Secondary shards: each node keeps the gathered values, so that the gathers of the backward stay
within it (hpZ of ZeRO++, arXiv:2306.10209, section 3.2).

A forward gathers a unit over all ranks; before anything changes the values, each rank keeps its
part of them, sharded over the ranks of its node. The gather of the backward reads these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from hf_zero.zero.gather.gather_source import GatherRequest, GatherSource
from hf_zero.zero.layout.flat_buffer import FlatBuffer


class Kept(Enum):
    """State of the secondary shards: whether they hold the values of this forward."""

    NO = "no"
    COMING = "coming"  # the gather under way fills them
    YES = "yes"


class SecondaryShards(GatherSource):
    """The gathers of a unit with the sharded ``flats``, ``label`` in messages: over all ranks in a
    forward, within the node in its backward.

    ``shards``: by flat buffer, this rank's part of the values of the last forward, [padded / ranks
    of a node], compute dtype.
    """

    def __init__(self, flats: Sequence[FlatBuffer], label: str):
        self._flats, self._label = list(flats), label
        self.shards: dict[FlatBuffer, torch.Tensor] = {}
        # May still be COMING where the gather was not waited for (:meth:`awaits_values`);
        # :meth:`Unit.launch_gather` finishes it before it asks again, so ranks choose alike.
        self._kept = Kept.NO
        self._versions: list[int] = []  # of the flat buffers, when their values were kept

    def awaits_values(self) -> bool:
        return self._kept is Kept.COMING

    def request(self, exact: bool, backward: bool) -> GatherRequest | None:
        node = self._flats[0].mesh.node
        # a module may have written to its weights in the forward
        current = self._kept is Kept.YES and self._versions == self._read_versions()
        if backward and current and node is not None:
            pairs = [(flat.full, self.shards[flat]) for flat in self._flats]
            # no codec: the values kept are decoded ones
            return GatherRequest(node, f"{self._label} in a node", pairs)
        self._kept = Kept.NO if exact or node is None else Kept.COMING
        return None

    def keep(self) -> None:
        if self._kept is not Kept.COMING:
            return
        with torch.inference_mode(False), torch.no_grad():
            for flat in self._flats:
                node = flat.mesh.node
                assert node is not None
                numel = flat.layout.padded // node.size
                part = flat.full.narrow(0, node.rank * numel, numel)
                if flat not in self.shards:
                    self.shards[flat] = torch.empty_like(part)
                self.shards[flat].copy_(part)
        self._versions = self._read_versions()
        self._kept = Kept.YES

    def _read_versions(self) -> list[int]:
        """Return the numbers of changes of the values, which ranks count alike."""
        return [flat.version for flat in self._flats]

    def forget(self) -> None:
        self._kept = Kept.NO

    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())

    def free(self) -> None:
        self.shards.clear()
        self._kept = Kept.NO
