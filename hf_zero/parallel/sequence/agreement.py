"""Check that ranks that share sequences read parts of the same batches, and find the documents in
these. The numbers travel between hosts if the process group has a backend for it, so that a forward
does not wait for the device.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.errors import RankMismatchError
from hf_zero.parallel.alike import due, hash_of
from hf_zero.parallel.sequence.attention import KEY
from hf_zero.parallel.sequence.batches import documents_of
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.exchange import all_gather

KEPT = 64  # maximum number of hashes of batches that were cut but not read yet
_UNKNOWN = 0


class SameBatches:
    """Compare the batches whose parts the ranks along an axis read.

    A part alone does not identify its batch. So the hash of some batches is kept when they are cut,
    until a forward reads the part cut from them. Only the sizes are compared for parts that a
    script has cut itself.
    """

    def __init__(self) -> None:
        self._cuts = 0
        self._known: OrderedDict[int, int] = OrderedDict()  # hash of the batch by that of the part

    @staticmethod
    def along(dim: MeshDim) -> SameBatches:
        """Return the one instance of ``dim``, whoever cuts batches for its ranks."""
        return _by_axis.setdefault(dim, SameBatches())

    def remember(self, batch: Mapping[str, Any], part: Mapping[str, Any]) -> None:
        """Record that this rank's part of ``batch`` is ``part``. Hashes only calls that are due."""
        self._cuts += 1
        if not due(self._cuts):
            return
        own = _hash_of_part(part)
        if own is None:
            return
        whole = hash_of(
            each
            for _, each in sorted(batch.items())
            if isinstance(each, torch.Tensor) and not each.is_floating_point()
        )
        # equal parts of different batches, such as pure padding, do not identify their batch
        self._known[own] = whole if self._known.get(own, whole) == whole else _UNKNOWN
        while len(self._known) > KEPT:
            self._known.popitem(last=False)

    def compare(
        self, dim: MeshDim, positions: torch.Tensor, inputs: Mapping[str, Any]
    ) -> Documents:
        """Return the documents of the batch of which a forward over ``inputs`` with ``positions``
        [rows, tokens] reads a part. Collective along ``dim``; all its ranks raise RankMismatchError
        if their batches differ.

        Positions that a script has created or changed are gathered and read; the host waits for
        them.
        """
        documents = documents_of(positions)
        whole = _UNKNOWN
        if self._known:
            whole = self._known.pop(_hash_of_part(inputs) or _UNKNOWN, _UNKNOWN)
        code = _UNKNOWN if documents is None else documents.code
        own = torch.tensor([*positions.shape, whole, code], device=dim.host_messages_on)
        *sizes, batches, codes = all_gather(dim, "sizes of batches", own).T.tolist()
        shapes = [list(shape) for shape in zip(*sizes)]
        ranks, count = dim.ranks, dim.size
        these = (
            f"ranks {', '.join(map(str, ranks))}, which share sequences "
            f"({KEY} = {count}), were given parts of"
        )
        if any(shape != shapes[0] for shape in shapes):
            raise RankMismatchError(
                f"{these} {shapes} tokens; let each have as many of the same batch, as "
                "hf_zero.sequence_parallel().shard(batch) cuts them"
            )
        if any(len({*each} - {_UNKNOWN}) > 1 for each in (batches, codes)):
            alike = count * (ranks[1] - ranks[0])  # including tensor-parallel ranks
            raise RankMismatchError(
                f"{these} different batches; read data as rank // {alike} of ranks // {alike} "
                f"(DistributedSampler(data, world_size // {alike}, rank // {alike})), or let each "
                "rank read its own and iterate hf_zero.sequence_parallel().batches(loader), which "
                "cuts those of all of them in turn"
            )
        if documents is None or _UNKNOWN in codes:
            parts = all_gather(dim, "position_ids", positions)
            return Documents.of(0, parts.transpose(0, 1).flatten(1))
        return documents


_by_axis: weakref.WeakKeyDictionary[MeshDim, SameBatches] = weakref.WeakKeyDictionary()


def _hash_of_part(part: Mapping[str, Any]) -> int | None:
    tokens, positions = part.get("input_ids"), part.get("position_ids")
    if not isinstance(tokens, torch.Tensor) or not isinstance(positions, torch.Tensor):
        return None
    return hash_of((tokens, positions))
