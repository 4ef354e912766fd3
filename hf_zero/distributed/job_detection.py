"""The detection of hangs and dead ranks in a job: posts in the store, a watchdog that polls waits,
recovery after exceptions, and heartbeats between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.hang_detection import HangDetection, Watchdog
from hf_zero.distributed.host_heartbeats import HostHeartbeats, learn_hosts
from hf_zero.distributed.pass_tracker import PassTracker
from hf_zero.distributed.rank_status import PostedStatus
from hf_zero.distributed.recovery import RecoverablePasses, RecoveryBoard
from hf_zero.distributed.store import STORE_SECONDS, TimeoutStore
from hf_zero.distributed.uncaught import has_agent_store
from hf_zero.distributed.watchdog import PollingWatchdog


class JobDetection(HangDetection):
    """The detection in a job of several ranks."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        # a separate client: calls on a shared one block each other
        posts = TimeoutStore(store, patience=STORE_SECONDS)
        self._status = PostedStatus(posts, rank, world, None if has_agent_store() else 0)
        self._board = RecoveryBoard(posts, rank)
        self.watchdog: PollingWatchdog = PollingWatchdog(
            rank_status=self._status, answer=self._board.answer_statements
        )

    @classmethod
    def watchdog_of_start(cls) -> Watchdog:
        return PollingWatchdog()

    def tracker(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        logs: Mapping[str, CollectiveLog],
        timeout: float,
    ) -> PassTracker:
        return RecoverablePasses(name, rank, ranks, logs, self.watchdog, timeout, self._board)

    def meet(
        self,
        identities: Sequence[str],
        exchange: Callable[..., list[Any]],
        host_timeout: float,
        timeout: float,
    ) -> HostHeartbeats | None:
        self._status.know(identities)
        rank, world = self._status.rank, self._status.world
        heartbeats = learn_hosts(exchange, rank, world, host_timeout, timeout)
        if heartbeats is not None:
            heartbeats.hold(host_timeout)
            self._status.watch_hosts(heartbeats)
        return heartbeats
