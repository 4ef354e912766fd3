"""The device mesh of one engine: its shard and replicate dimensions, and what its ranks share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed import rank_hosts
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats, PendingCollective
from hf_zero.distributed.collectives import DEFAULT_TIMEOUT, DimGroups, MeshDim
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.init import MARGIN_SECONDS
from hf_zero.distributed.process_group import get_rank, get_world_size, group_backend
from hf_zero.distributed.rank_status import first_line
from hf_zero.distributed.recovery import PassTracker
from hf_zero.distributed.store import StoreMessages
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.distributed.world_group import barrier, broadcast, get_world_group


class Mesh:
    """The ranks of one engine as a mesh of ``shards`` × replicas, and the store in which they
    agree.
    """

    def __init__(
        self,
        shards: int,
        device: torch.device,
        timeout: float = DEFAULT_TIMEOUT,
        updates: bool = False,
        node: int = 1,
    ):
        """``updates``: another communicator over the shards, for a thread that gathers updated
        parameters and all else. ``node``: each so many ranks of a shard group are one dimension
        more, for gathers alone.
        """
        self.rank, self.world = get_rank(), get_world_size()
        self.stats = CollectiveStats()
        self.timeout = timeout
        backend = group_backend(device)
        self.device = device
        # waiting for a collective blocks the host, not a stream
        self.blocks = kinds.is_host(device)
        self.watchdog = Watchdog(enabled=False)
        self.consensus: Consensus | None = None
        self.name = "engine"
        logs: dict[str, CollectiveLog] = {}
        board = None
        if self.world > 1 and backend != "fake":
            world = get_world_group()
            world.log.timeout = timeout
            self.watchdog, board = world.watchdog, world.recovery_board
            store = dist.distributed_c10d._get_default_store()
            self.name = f"engine {store.add(f'hf_zero/engines/{self.rank}', 1)}"
            logs["agreements"] = log = CollectiveLog(
                f"agreements of {self.name}", range(self.world), timeout, native=False
            )
            if self.watchdog.rank_status is not None:
                self.watchdog.rank_status.register(log)
            shared = dist.PrefixStore(f"hf_zero/{self.name}", store)
            self.consensus = Consensus(shared, self.rank, self.world, timeout, self.watchdog, log)
            # Making groups blocks in native code, where a rank that does not come cannot be named.
            self.consensus.gathers.agree("initialize", (0, 0), lambda _: "making of the engine")
            if self.watchdog.rank_status is not None:
                rank_hosts.learn(store, self.rank, self.world)
                if self.watchdog.rank_status.store_host is not None:
                    # while it can still be asked
                    self.watchdog.rank_status.learn_identity(self.watchdog.rank_status.store_host)
        rows = [list(range(start, start + shards)) for start in range(0, self.world, shards)]
        columns = [list(range(start, self.world, shards)) for start in range(shards)]
        self.shard = self._axis(rows, backend, "", device)
        self.replicate = self._axis(columns, backend, " across replicas", device)
        self.updates = (
            self._axis(rows, backend, " of updates", device, self._quiet(), places=1)
            if updates and shards > 1
            else None
        )

        self.node: MeshDim | None = None
        if node > 1:
            nodes = [row[at : at + node] for row in rows for at in range(0, shards, node)]
            self.node = self._axis(nodes, backend, " in a node", device, places=1)

        named = [(self.shard, ""), (self.replicate, " over replicas")]
        if self.node is not None:
            named.append((self.node, " in a node"))
        for axis, kind in named:
            if axis.size > 1:
                for each in (axis.gathers, axis.reductions):
                    each.issue_deferred = get_world_group().deferred.issue
                logs |= {f"gathers{kind}": axis.gathers, f"reductions{kind}": axis.reductions}
        self.passes = PassTracker(
            self.name, self.rank, self.world, logs, self.watchdog, timeout, board
        )

    def issue_before_others(self, issue: Callable[[], None]) -> None:
        """Have ``issue``, a method whose object is held weakly, called before each collective of
        this rank's engines and of the world group: it issues what another thread has to issue.
        """
        get_world_group().deferred.add(issue)

    def _quiet(self) -> Watchdog:
        """A watch that knows what ends this rank, and leaves the watching to the caller that waits
        for the thread: a rank waits for one thing.
        """
        watchdog = Watchdog(enabled=False)
        watchdog.rank_status = self.watchdog.rank_status
        return watchdog

    def _axis(
        self,
        sets: list[list[int]],
        backend: str,
        kind: str,
        device: torch.device,
        watchdog: Watchdog | None = None,
        places: int = 2,
    ) -> MeshDim:
        mine, groups = next(ranks for ranks in sets if self.rank in ranks), [None, None]
        if len(mine) > 1:
            for place in range(places):
                for ranks in sets:
                    # Of the device's backend alone, which need not be the only one of the job's
                    # group.
                    own = None if kinds.is_host(device) else backend
                    made = dist.new_group(
                        ranks, timeout=timedelta(seconds=self.timeout + MARGIN_SECONDS), backend=own
                    )
                    if self.rank in ranks:
                        groups[place] = made
        name = f"{self.name}{kind}"
        if not kinds.is_host(device):
            # Communicators are made by their first collective, which takes memory and blocks the
            # host: not in the midst of a backward.
            for made in filter(None, groups):
                with self.watchdog.watching(
                    PendingCollective(f"the communicators of {name}", needs=tuple(mine))
                ):
                    dist.all_reduce(torch.zeros(1, device=device), group=made)
        return MeshDim(
            mine,
            self.rank,
            DimGroups(groups[0], groups[1], backend, device),
            self.stats,
            watchdog or self.watchdog,
            name,
            self.timeout,
        )

    @property
    def _axes(self) -> list[MeshDim]:
        return [self.shard, self.replicate, *filter(None, (self.updates, self.node))]

    def close(self, groups: bool = True, why: str = "destroyed its engine") -> None:
        """Let go of threads and, with ``groups``, of the process groups; collectives of this
        mesh end here.
        """
        if self.consensus is not None:
            self.consensus.close(why)
        for axis in self._axes:
            axis.gathers.closed = axis.reductions.closed = why
        if self.watchdog.rank_status is not None:
            self.watchdog.rank_status.publish("here")
        if groups:
            for axis in self._axes:
                axis.close()

    def record_last_error(self, error: BaseException | None) -> None:
        """Set what is published if this rank ends now: the exception that its last forward has
        raised; None once one has gone well.
        """
        if self.watchdog.rank_status is not None:
            self.watchdog.rank_status.last_error = "" if error is None else first_line(error)

    def barrier(self) -> None:
        barrier()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
        if self.world > 1 and tensor.numel():
            self.stats.record("broadcast", "", tensor.nbytes)
            broadcast(tensor, source)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value if self.world == 1 else get_world_group().broadcast_object(value, source)

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        return [value] if self.world == 1 else get_world_group().all_gather_object(value, what)

    def store_messages(self, topic: str) -> StoreMessages | None:
        """What a thread uses to talk to those of the other ranks; None for one rank, and where
        ranks share no store.
        """
        if self.consensus is None:
            return None
        rank_status = self.watchdog.rank_status
        store = dist.PrefixStore(
            f"hf_zero/{self.name}/{topic}", dist.distributed_c10d._get_default_store()
        )
        return StoreMessages(
            store,
            self.rank,
            self.timeout,
            rank_status.exit_reason if rank_status is not None else lambda rank: None,
        )
