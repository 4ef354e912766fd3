"""All-gathers in two hops, across nodes and then within each.

[Note: two hops]
If ranks exchange their chunks directly, each rank of a node receives every chunk of the other
nodes. In two hops the G ranks of a node divide these chunks: each receives the chunks of the ranks
with its index in the other nodes, and forwards them to the others in its node. So of P bytes
gathered over M nodes P (M - 1) / M enter a node instead of G times as many (MiCS,
arXiv:2205.00119, section 3.3).

The second hop needs the result of the first. On a device a side stream waits for the first hop, so
the second one is issued right behind it, and both are over before a prefetched unit is used. To the
ranks the two are then one gather: it ends when all ranks have issued it, and those before it.

Where waiting blocks the host, the second hop is issued as soon as this rank waits for the
gather or for a later one, or is about to wait for what other ranks may issue only after they have
waited for the gather (:meth:`TwoHops.advance`): never by a gather ahead of its time, which would
wait for ranks that may be waiting for this one. A wait for a first hop therefore has the place of
the wait for its gather in the common order of gathers and reductions, which cannot deadlock
(hf_zero/zero/reduce/reduction_order.py, the note).

The hops over each communicator have the order of the gathers on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from hf_zero.device import streams
from hf_zero.distributed.process_group import Waitable
from hf_zero.errors import PartitionError

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class GatherDim(Protocol):
    """A dimension of the mesh, as far as gathers need it."""

    size: int
    rank: int

    def all_gather(self, pairs: Pairs, key: str) -> Waitable: ...


class TwoHops:
    """The gathers of a dimension whose ranks are those of ``across`` times those of ``node``: its
    rank G * i + j is rank i of ``across``, for ranks in place j of their node.
    """

    def __init__(self, across: GatherDim, node: GatherDim):
        self.across, self.node = across, node
        self._pending: deque[TwoHopGather] = deque()  # second hops still to issue, in order

    def gather(self, pairs: Pairs, key: str, follows: torch.device | None) -> TwoHopGather:
        """Issue the first hop of :meth:`MeshDim.all_gather`, and the second one if streams wait for
        it; ``follows`` as for a Handle.
        """
        if follows is None:
            gather = TwoHopGather(self, pairs, key)
            self._pending.append(gather)
            return gather
        beside = streams.side_stream(follows, streams.Use.HOPS)
        beside.wait_stream(streams.current_stream(follows))
        for _, chunk in pairs:  # the caller may free it
            chunk.record_stream(beside)
        with streams.on_stream(beside):
            gather = TwoHopGather(self, pairs, key)
            self._pending.append(gather)
            self.advance()
        return gather

    def advance(self, ahead: int = 0) -> None:
        """Issue the second hops of all gathers but the last ``ahead``."""
        while len(self._pending) > ahead:
            self._issue_next()

    def advance_through(self, gather: TwoHopGather) -> None:
        while gather in self._pending:
            self._issue_next()

    def _issue_next(self) -> None:
        self._pending[0].wait_for_first_hop()  # an interrupt leaves it the next one
        self._pending.popleft().issue_second_hop()


class TwoHopGather:
    """One two-hop gather; a :class:`Handle` waits for it."""

    def __init__(self, hops: TwoHops, pairs: Pairs, key: str):
        self._hops, self._pairs, self._key = hops, list(pairs), key
        nodes = hops.across.size
        self._came = [chunk.new_empty(nodes * chunk.numel()) for _, chunk in pairs]
        first = [(came, chunk) for came, (_, chunk) in zip(self._came, pairs)]
        self._first = hops.across.all_gather(first, f"{key} across nodes")
        self._second: Waitable | None = None

    def wait_for_first_hop(self) -> None:
        self._first.wait()

    def issue_second_hop(self) -> None:
        """Issue the second hop, after the first."""
        node, nodes = self._hops.node, self._hops.across.size
        pairs = []
        for (full, chunk), came in zip(self._pairs, self._came):
            places = full.view(nodes, node.size, chunk.numel())
            places[:, node.rank].copy_(came.view(nodes, -1))
            pairs += [(tensor.view(-1), tensor[node.rank]) for tensor in places]
        self._second = node.all_gather(pairs, f"{self._key} in a node")
        self._pairs, self._came = [], []

    def wait(self) -> None:
        self._hops.advance_through(self)
        if self._second is None:
            raise PartitionError(
                f"an interrupt has broken off the gather of {self._key} between its two hops, "
                "which other ranks wait for; end the job, and resume it from a checkpoint"
            )
        self._second.wait()
