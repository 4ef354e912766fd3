"""Creation of mesh dimensions: their process groups, on all ranks of the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.collective_log import CollectiveStats, PendingCollective
from hf_zero.distributed.collectives import MARGIN_SECONDS, DimGroups, MeshDim
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import ConfigError

# number of hardware queues that the streams of a process share on an NVIDIA GPU
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class DimMaker:
    """Make dimensions for tensors on ``device``; ``watchdog`` watches their waits."""

    rank: int
    device: torch.device
    backend: str
    watchdog: Watchdog
    timeout: float

    def make(
        self,
        sets: Sequence[Sequence[int]],
        name: str,
        stats: CollectiveStats,
        places: int = 2,
        watchdog: Watchdog | None = None,
        shares: bool = False,
    ) -> MeshDim:
        """Return the dimension over the one of ``sets`` that contains this rank. Each rank of the
        job is in one of them (collective over all, with the same sets).

        ``name`` names the dimension in messages. ``places``: number of communicators; with 1
        nothing is reduced over it unless it ``shares`` one with gathers, for ranks that issue both
        in one order. ``watchdog``: another one for its waits.

        Raises ConfigError if ranks of NVIDIA GPUs launch through one connection: two communicators
        then wait for each other.
        """
        self._check_connections(sets)
        mine, groups = next(ranks for ranks in sets if self.rank in ranks), [None, None]
        if any(len(ranks) > 1 for ranks in sets):
            for place in range(places):
                for ranks in sets:
                    made = self._group(ranks, name, gathers=not place)
                    if self.rank in ranks:
                        groups[place] = made
        if shares:
            groups[1] = groups[0]
        return MeshDim(
            mine,
            self.rank,
            DimGroups(groups[0], groups[1], self.backend, self.device),
            stats,
            watchdog or self.watchdog,
            name,
            self.timeout,
        )

    def _check_connections(self, sets: Sequence[Sequence[int]]) -> None:
        one = os.environ.get(CONNECTIONS) == "1"
        if one and kinds.is_nvidia(self.device) and any(len(ranks) > 1 for ranks in sets):
            raise ConfigError(
                f"{CONNECTIONS} is 1: all streams of a GPU then share one queue, in which the "
                "gathers and the reductions of two ranks, which are issued in different orders, "
                f"wait for each other for ever; unset it, or export {CONNECTIONS}=8"
            )

    def _group(self, ranks: Sequence[int], name: str, gathers: bool) -> Any:
        if len(ranks) == 1:
            return None
        # Only the device's backend; the job's group may have others.
        own = None if kinds.is_host(self.device) else self.backend
        limit = timedelta(seconds=self.timeout + MARGIN_SECONDS)
        options: Any = None
        if gathers and self.backend == "nccl":
            # Ranks that skip blocks issue gathers and reductions in different orders
            # (reduction_order.py): the streams of the two groups are taken from two pools, and are
            # never the same one (device/streams.py, the note).
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = limit
        made = dist.new_group(list(ranks), timeout=limit, backend=own, pg_options=options)
        if self.rank in ranks:
            connect(made, ranks, self.device, self.watchdog, name)
        return made


def connect(
    group: Any, ranks: Sequence[int], device: torch.device, watchdog: Watchdog, name: str
) -> None:
    """Create the communicator of ``group``, of ``ranks`` (global), for ``device`` (collective over
    them).

    Communicators are created by their first message, which takes memory and blocks the host: this
    must not happen in a forward or backward. A communicator between two ranks may wait there for
    ranks that have no part in its messages.
    """
    if kinds.is_host(device):
        return
    pending = PendingCollective(f"the communicators of {name}", needs=tuple(ranks))
    with watchdog.watching(pending):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
