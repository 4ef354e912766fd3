"""The check that ranks which share sequences read parts of the same batches; it finds the documents
in them.

Its numbers travel between hosts if the process group has a backend for it, so that a forward does
not wait for the device.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.errors import RankMismatchError
from hf_zero.parallel.alike import due, hash_of
from hf_zero.parallel.sequence.batches import documents_of
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.exchanges import all_gather

KEPT = 64  # maximum number of hashes of batches that were cut but not read yet
_UNKNOWN = 0  # in place of a hash


class SameBatches:
    """Compare the batches whose parts the ranks along an axis read.

    A part alone does not identify its batch. So the hash of some batches is kept when they are cut,
    until a forward reads the part cut from them. Only the sizes are compared for parts that a
    script has cut itself.
    """

    def __init__(self) -> None:
        self._cuts = 0
        self._batch_of_part: OrderedDict[int, int] = OrderedDict()  # their hashes

    @staticmethod
    def along(dim: MeshDim) -> SameBatches:
        """Return the one instance of ``dim``, whoever cuts batches for its ranks."""
        return _by_axis.setdefault(dim, SameBatches())

    def remember(self, batch: Mapping[str, object], part: Mapping[str, object]) -> None:
        """Record that this rank's part of ``batch`` is ``part``. Hashes only calls that are due."""
        self._cuts += 1
        if not due(self._cuts):
            return
        key = _hash_of_part(part)
        if key is None:
            return
        whole = hash_of(
            value
            for _, value in sorted(batch.items())
            if isinstance(value, torch.Tensor) and not value.is_floating_point()
        )
        # equal parts of different batches, such as pure padding, do not identify their batch
        self._batch_of_part[key] = (
            whole if self._batch_of_part.get(key, whole) == whole else _UNKNOWN
        )
        while len(self._batch_of_part) > KEPT:
            self._batch_of_part.popitem(last=False)

    def compare(
        self,
        dim: MeshDim,
        division: Division,
        positions: torch.Tensor,
        inputs: Mapping[str, object],
    ) -> Documents:
        """Return the documents of the batch of which a forward over ``inputs`` with ``positions``
        [rows, tokens] reads a part; forget the hash of that batch. Collective along ``dim``; all
        its ranks raise RankMismatchError if their batches differ.

        Positions that a script has created or changed are gathered and read; the host waits for
        them.
        """
        documents = documents_of(positions)
        whole = _UNKNOWN
        if self._batch_of_part:
            whole = self._batch_of_part.pop(_hash_of_part(inputs) or _UNKNOWN, _UNKNOWN)
        code = _UNKNOWN if documents is None else documents.code
        local = torch.tensor([*positions.shape, whole, code], device=dim.host_messages_on)
        *sizes, batches, codes = all_gather(dim, "sizes of batches", local).T.tolist()
        shapes = [list(shape) for shape in zip(*sizes)]
        ranks, count = dim.ranks, dim.size
        these = (
            f"ranks {', '.join(map(str, ranks))}, which share sequences "
            f"({division}), were given parts of"
        )
        if any(shape != shapes[0] for shape in shapes):
            raise RankMismatchError(
                f"{these} {shapes} tokens; let each have as many of the same batch, as "
                "hf_zero.sequence_parallel().shard(batch) cuts them"
            )
        if any(len({*values} - {_UNKNOWN}) > 1 for values in (batches, codes)):
            alike = count * (ranks[1] - ranks[0])  # including tensor-parallel ranks
            raise RankMismatchError(
                f"{these} different batches; read data as rank // {alike} of ranks // {alike} "
                f"(DistributedSampler(data, world_size // {alike}, rank // {alike})), or let each "
                "rank read its own and iterate hf_zero.sequence_parallel().batches(loader), which "
                "cuts those of all of them in turn"
            )
        if documents is None or _UNKNOWN in codes:
            parts = all_gather(dim, "position_ids", positions)
            return Documents.from_positions(0, division.whole(parts.unbind()))
        return documents


_by_axis: weakref.WeakKeyDictionary[MeshDim, SameBatches] = weakref.WeakKeyDictionary()


def _hash_of_part(part: Mapping[str, object]) -> int | None:
    tokens, positions = part.get("input_ids"), part.get("position_ids")
    if not isinstance(tokens, torch.Tensor) or not isinstance(positions, torch.Tensor):
        return None
    return hash_of((tokens, positions))
