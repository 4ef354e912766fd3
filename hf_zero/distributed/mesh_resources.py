"""Resources of the job that an engine holds on this rank and releases at its end: process groups,
the logs of its communicators, its keys in the ranks' store.

[Note: the end of an engine]
``destroy`` closes the process groups at once. A garbage-collected engine may have left collectives
that other ranks still need, or that some of them never join: its groups are aborted and closed when
all ranks have met to make the next engine. Logs and keys end at a time common to all ranks. Each
rank that holds the engine counts in the store; the last one to leave deletes the engine's keys.
Until then the logs stay in the posts of a rank (rank_status.py), where they prove to others that it
issues nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.group_ends import abort_together
from hf_zero.distributed.rank_group import RankGroup
from hf_zero.distributed.rank_status import RankStatus

HOLDERS = "holders"  # ranks that have made the engine and not left it


class Server(Protocol):
    """A thread that answers other ranks."""

    def end(self) -> None: ...


class MeshResources:
    """The resources of one engine. Holds no reference to the engine itself, and outlives it.

    ``rank_status`` publishes its logs, None if ranks share no store; ``unsettled`` are the
    resources of this rank that are not released yet.
    """

    def __init__(self, rank_status: RankStatus | None, unsettled: list[MeshResources]):
        self._rank_status, self._unsettled = rank_status, unsettled
        self._store: Any = None
        self._server: Server | None = None
        self._dims: list[MeshDim] = []
        self._groups: list[RankGroup] = []
        self._logs: list[CollectiveLog] = []
        self._abandoned = self._left = False

    def join(self, store: Any) -> None:
        """Count this rank among the holders of the keys in ``store``, the engine's own."""
        self._store = store
        store.add(HOLDERS, 1)

    def hold(
        self,
        dims: Sequence[MeshDim],
        groups: Sequence[RankGroup],
        logs: Sequence[CollectiveLog],
        server: Server | None,
    ) -> None:
        """Take over process groups and logs, and the thread that uses the store."""
        self._server = server
        self._dims, self._groups, self._logs = list(dims), list(groups), list(logs)
        for axis in dims:
            self._logs += [axis.gathers, axis.reductions]
        self._logs += [group.log for group in groups]

    def abandon(self) -> None:
        """Note that the engine was garbage-collected: :meth:`settle` closes what it left open."""
        self._abandoned = True
        for axis in self._dims:
            axis.free_buffers()
        self._unsettled.append(self)

    def close_groups(self) -> None:
        """Destroy the process groups. Idempotent."""
        for axis in self._dims:
            axis.close()
        for group in self._groups:
            group.close()
        self._dims, self._groups = [], []

    def leave(self) -> None:
        """Note that this rank no longer uses the engine; the last such rank deletes the keys.
        Idempotent.
        """
        if self._left:
            return
        self._left = True
        self._unsettled.append(self)
        if self._server is not None:
            self._server.end()
        if self._store is None:
            return
        try:
            if self._store.add(HOLDERS, -1) == 0:
                for key in self._store.list_keys():
                    self._store.delete_key(key)
        except RuntimeError:
            self._store = None  # the store is gone, and its keys with it

    def settle(self) -> None:
        """Release what can be released: the process groups of a garbage-collected engine, and the
        logs of one that all ranks have left.
        """
        if self._abandoned:
            abort_together(dict(each for axis in self._dims for each in axis.aborts().items()))
            self.close_groups()
            self.leave()
        if self._dims or self._used_elsewhere():
            return
        if self._rank_status is not None:
            self._rank_status.unregister(self._logs)
        self._logs = []
        self._unsettled[:] = [each for each in self._unsettled if each is not self]

    def _used_elsewhere(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check([HOLDERS]))
        except RuntimeError:
            return False


def settle_all(unsettled: Sequence[MeshResources]) -> None:
    """Settle each of ``unsettled``."""
    for each in list(unsettled):
        each.settle()
