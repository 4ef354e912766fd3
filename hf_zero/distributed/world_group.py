"""Blocking collectives over all ranks of the job, each verified on all of them before it runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective
from hf_zero.distributed.collectives import (
    BLOCKING,
    DEFAULT_TIMEOUT,
)
from hf_zero.distributed.deferred import DeferredCollectives
from hf_zero.distributed.group_ends import CPU, abort
from hf_zero.distributed.process_group import (
    add_host_backend,
    default_device,
    get_world_size,
    group_backend,
    is_initialized,
)
from hf_zero.distributed.rank_group import RankGroup
from hf_zero.distributed.rank_status import RankStatus, first_line
from hf_zero.distributed.recovery import RecoveryBoard
from hf_zero.distributed.store import TimeoutStore
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import RankMismatchError


class WorldGroup(RankGroup):
    """All ranks of the job, over the default group."""

    def __init__(self, store: Any) -> None:
        rank, self.world = dist.get_rank(), dist.get_world_size()
        backend = str(dist.get_backend())
        rank_status: RankStatus | None = None
        self.recovery_board: RecoveryBoard | None = None
        if self.world > 1 and backend not in ("threaded", "fake"):
            shared = dist.PrefixStore("hf_zero/ranks", store)
            number = shared.add(f"made/{rank}", 1)
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            # a separate client: calls on a shared one block each other
            own = TimeoutStore(dist.PrefixStore(str(number), shared))
            rank_status = RankStatus(own, rank, self.world, None if agent else 0)
            self.recovery_board = RecoveryBoard(own, rank)
        watchdog = Watchdog(
            enabled=rank_status is not None,
            rank_status=rank_status,
            poll=self.recovery_board.answer_statements if self.recovery_board is not None else None,
        )
        if rank_status is not None:
            every = PendingCollective("gloo's connections", needs=tuple(range(self.world)))
            with watchdog.watching(every):
                add_host_backend(timedelta(seconds=DEFAULT_TIMEOUT))
        off = partial(
            abort, dist.group.WORLD, group_backend(CPU), self.world, rank, default_device()
        )
        native = group_backend(CPU) in BLOCKING  # other backends do not report a peer that dies
        log = CollectiveLog("calls of all ranks", range(self.world), DEFAULT_TIMEOUT, off, native)
        agrees = rank_status is not None and group_backend(CPU) == "gloo"
        super().__init__(range(self.world), rank, None, log, watchdog, agrees)
        if rank_status is not None:
            rank_status.register(log)
        self.deferred = DeferredCollectives()
        # resources of ended engines that are not released yet
        self.unsettled: list[Any] = []
        self.log.issue_deferred = self.deferred.issue

    def part(
        self, ranks: Sequence[int], group: Any, timeout: float, owner: str = "a job"
    ) -> RankGroup:
        """Return the group of some ``ranks``, this one among them, over their process group
        ``group``; this group itself if they are all ranks. Its waits are watched like those of all
        ranks. ``owner`` names the group's owner in messages.
        """
        if len(ranks) == self.world:
            return self
        off = partial(
            abort,
            group,
            group_backend(CPU),
            len(ranks),
            list(ranks).index(self.rank),
            default_device(),
        )
        name = f"calls of {owner} on ranks {', '.join(map(str, ranks))}"
        log = CollectiveLog(name, ranks, timeout, off, self.log.native)
        if self.watchdog.rank_status is not None:
            self.watchdog.rank_status.register(log)
        log.issue_deferred = self.deferred.issue
        return RankGroup(ranks, self.rank, group, log, self.watchdog, self._agrees)


_world_groups: weakref.WeakKeyDictionary[Any, WorldGroup] = weakref.WeakKeyDictionary()


def get_world_group() -> WorldGroup:
    """Return the world group of the current process group, made by the first call (collective)."""
    store = dist.distributed_c10d._get_default_store()
    if store not in _world_groups:
        _world_groups[store] = WorldGroup(store)
    return _world_groups[store]


def barrier(group: Any = None) -> None:
    if not is_initialized() or dist.get_world_size(group) == 1:
        return
    if group is None or group is dist.group.WORLD:
        get_world_group().barrier()
    else:
        dist.barrier(group)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
    if is_initialized() and dist.get_world_size() > 1 and tensor.numel():
        get_world_group().broadcast(tensor, source)


@contextmanager
def raise_on_all_ranks(what: str) -> Iterator[None]:
    """Run a block that must succeed on all ranks.

    Collective: an exception on one rank is raised there, and as RankMismatchError that names it on
    the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if get_world_size() > 1 and not isinstance(error, RankMismatchError):
        outcomes = get_world_group().all_gather_object(
            None if error is None else first_line(error), f"outcome of {what}"
        )
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
        if error is None and failed:
            rank, outcome = next(iter(failed.items()))
            raise RankMismatchError(
                f"rank {rank} could not {what}: {outcome}. All ranks give it up; mend it "
                "there and start again"
            )
    if error is not None:
        raise error
