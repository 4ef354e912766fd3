"""Messages between host memories of ranks, over gloo connections of their own, for a thread beside
the training: large tensors in pieces, and one small agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_zero.distributed.backends import group_backend
from hf_zero.distributed.process_group import CPU, default_store
from hf_zero.errors import RankMismatchError

PIECE = 8 << 20  # bytes of one message
Peer = tuple[int, torch.Tensor]  # a rank, and the tensor sent to it or received from it


class HostTransfers:
    """Connections of ``rank`` with the ``world`` ranks of the job. The constructor connects them
    (collective); ``name`` is unique within the job. All ranks make the same calls in the same
    order, from one thread at a time. Waits end with RuntimeError after ``timeout`` seconds, or when
    a peer has ended.
    """

    def __init__(self, name: str, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world = rank, world
        self._group: dist.ProcessGroupGloo | None = None
        self._closed = False
        if world > 1 and group_backend(CPU) != "fake":
            store = dist.PrefixStore(f"hf_zero/{name}", default_store())
            limit = timedelta(seconds=timeout)
            self._group = dist.ProcessGroupGloo(store, rank, world, timeout=limit)

    def transfer(
        self,
        sends: Sequence[Peer],
        receives: Sequence[Peer],
        received: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Send and receive tensors in host memory: [bytes] of uint8, contiguous. Both ends of a
        transfer list it in the same call with tensors of one size; several between the same two
        ranks are paired in order. ``received`` is called with the number of a receive and each of
        its pieces, in order, while the next pieces are under way.
        """
        group = self._connected()
        ends = [(True, *send) for send in sends] + [(False, *receive) for receive in receives]
        if group is None or not ends:
            return
        # In rounds of one piece of each: a rank that waits in a round has posted its part of it, so
        # that no set of ranks waits for each other. The round after it is posted, too.
        before: list[tuple[dist.Work, int, torch.Tensor]] = []
        for at in range(0, max(tensor.numel() for _, _, tensor in ends) + PIECE, PIECE):
            posted = []
            for number, (outgoing, peer, tensor) in enumerate(ends, -len(sends)):
                piece = tensor[at : at + PIECE]
                if piece.numel():
                    # torch's stubs lack the methods of its backends
                    post = group.send if outgoing else group.recv  # type: ignore[attr-defined]
                    posted.append((post([piece], peer, 0), number, piece))
            for work, number, piece in before:
                work.wait()
                if number >= 0 and received is not None:
                    received(number, piece)
            before = posted

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks."""
        group = self._connected()
        if group is None:
            return ok
        count = torch.tensor([int(ok)])
        group.allreduce([count]).wait()  # type: ignore[attr-defined]
        return int(count) == self.world

    def _connected(self) -> dist.ProcessGroupGloo | None:
        """Return the group; None for one rank. Raises RankMismatchError if it is closed."""
        if self._closed:
            raise RankMismatchError(
                f"rank {self.rank} has closed its connections between host memories, as it does "
                "when a save into them fails; start the job again"
            )
        return self._group

    def close(self) -> None:
        """Close the connections; waits of other ranks for this one end with an error."""
        self._closed, self._group = True, None
