"""The device mesh of one engine: the ranks of each kind of its flat buffers, and their shared
state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed import rank_hosts
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats
from hf_zero.distributed.collectives import DEFAULT_TIMEOUT, MeshDim
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.dim_maker import DimMaker
from hf_zero.distributed.flat_mesh import DATA_PARALLEL, FlatMesh, FlatMeshMaker, MeshOptions, Sums
from hf_zero.distributed.mesh_resources import MeshResources, settle_all
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import ParallelGroups
from hf_zero.distributed.process_group import get_rank, get_world_size, group_backend
from hf_zero.distributed.rank_status import first_line
from hf_zero.distributed.recovery import PassTracker
from hf_zero.distributed.store import StoreMessages
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.distributed.world_group import get_world_group


class Mesh:
    """The ranks of one engine, its peers, and the store in which they agree.

    A flat buffer that only ZeRO cuts is held by all of them, ``shards`` x replicas (:attr:`whole`).
    If ``parallel`` splits the model among ranks, other buffers are held by the ranks with the same
    part (:meth:`of`); peers are then the ranks of this one's pipeline stage.
    """

    def __init__(
        self,
        shards: int,
        device: torch.device,
        timeout: float = DEFAULT_TIMEOUT,
        options: MeshOptions = DATA_PARALLEL,
        parallel: ParallelGroups | None = None,
    ):
        self.rank = get_rank()
        self.dims = parallel.dims if parallel is not None else ParallelDims(get_world_size())
        self.ranks = self.dims.ranks_sharing(self.rank)  # the peers, including this rank
        self.world = len(self.ranks)
        self.stats = CollectiveStats()
        self.device, self.timeout = device, timeout
        if parallel is not None:
            parallel.wait_at_most(timeout)
        self.watchdog = Watchdog(enabled=False)
        self.consensus: Consensus | None = None
        self.name = "engine"
        logs: dict[str, CollectiveLog] = {}
        board = None
        self._resources = MeshResources(None, [])
        backend = group_backend(device)
        if self.dims.world > 1 and backend != "fake":
            world = get_world_group()
            world.log.timeout = timeout
            self.watchdog, board = world.watchdog, world.recovery_board
            self._resources = MeshResources(self.watchdog.rank_status, world.unsettled)
            logs["agreements"] = self._meet()
            settle_all(world.unsettled)
        making = FlatMeshMaker(
            DimMaker(self.rank, device, backend, self.watchdog, timeout),
            self.dims,
            self.name,
            self.stats,
            shards,
            options,
        )
        self.peers = making.group(())
        self._of = {axes: making.flat_mesh(axes) for axes in options.cuts}
        self.whole = self._of[()]
        stages = parallel.along("pipeline") if parallel is not None else making.alone()
        self.sums = Sums(*making.sums(self.whole), stages)
        logs |= making.logs | (parallel.logs if parallel is not None else {})
        self.passes = PassTracker(
            self.name, self.rank, self.ranks, logs, self.watchdog, timeout, board
        )
        serving = self.consensus.fetches.serving if self.consensus is not None else None
        groups = [self.peers, *(each.group for each in self._of.values())]
        own = [each for each in groups if each is not None and len(each.ranks) < self.dims.world]
        agreements = [log for role, log in logs.items() if role == "agreements"]
        self._resources.hold(self._axes, own, agreements, serving)
        weakref.finalize(self, self._resources.abandon).atexit = False

    shard = property(attrgetter("whole.shard"))
    replicate = property(attrgetter("whole.replicate"))

    @property
    def blocks(self) -> bool:
        """Whether waiting for a collective blocks the host, not a stream."""
        return kinds.is_host(self.device)

    @property
    def job(self) -> Any:
        """An object whose object collectives span all ranks of the job: this mesh, or the world
        group if a pipeline has other stages.
        """
        return self if self.dims.pipeline == 1 else get_world_group()

    def of(self, axes: tuple[str, ...], partial: bool = False, stages: int = 1) -> FlatMesh:
        """Return the ranks of flat buffers that ``axes`` cut besides ZeRO. ``partial``: each
        tensor-parallel rank has a part of their gradient. ``stages``: number of pipeline stages
        that hold the same values.
        """
        mesh = self._of[axes]
        if partial:
            mesh = replace(mesh, gain=float(self.dims.tensor))
        return replace(mesh, weight=mesh.weight / stages) if stages > 1 else mesh

    def _meet(self) -> CollectiveLog:
        """Agree with the peers on the making of an engine; return the log of its agreements."""
        store = dist.distributed_c10d._get_default_store()
        rank_status = self.watchdog.rank_status
        stage = f" of stage {self.dims.coordinate(self.rank, 'pipeline')}"
        self.name = f"engine {store.add(f'hf_zero/engines/{self.rank}', 1)}"
        self.name += stage if self.dims.pipeline > 1 else ""
        log = CollectiveLog(f"agreements of {self.name}", self.ranks, self.timeout, native=False)
        if rank_status is not None:
            rank_status.register(log)
        shared = dist.PrefixStore(f"hf_zero/{self.name}", store)
        if self.world > 1:
            self._resources.join(shared)
            self.consensus = Consensus(
                shared, self.rank, self.ranks, self.timeout, self.watchdog, log
            )
            # Making groups blocks in native code, which cannot name a missing rank.
            self.consensus.gathers.agree("initialize", (0, 0), lambda _: "making of the engine")
        if rank_status is not None:
            rank_hosts.learn(store, self.rank, self.dims.world)
            if rank_status.store_host is not None:
                rank_status.learn_identity(rank_status.store_host)  # while it can still be asked
        return log

    def issue_before_others(self, issue: Callable[[], None]) -> None:
        """Have ``issue``, a method whose object is held weakly, called before each collective of
        this rank's engines and of the world group; it issues the collectives of another thread.
        """
        get_world_group().deferred.add(issue)

    @property
    def _axes(self) -> list[MeshDim]:
        of_flats = [(m.shard, m.replicate, m.updates, m.node, *m.hops) for m in self._of.values()]
        sums = () if self.sums.each is self.shard else (self.sums.each,)
        return [axis for axes in (*of_flats, sums) for axis in axes if axis is not None]

    def serve_until_nobody_asks(self) -> None:
        """Return when no other rank asks alone for this rank's shards, soon to be freed."""
        if self.consensus is not None:
            self.consensus.fetches.serve_until_nobody_asks()

    def close(self, groups: bool = True, why: str = "destroyed its engine") -> None:
        """End threads and, with ``groups``, the process groups; no further collectives of this
        mesh.
        """
        if self.consensus is not None:
            self.consensus.close(why)
        for axis in self._axes:
            axis.gathers.closed = axis.reductions.closed = why
        if self.watchdog.rank_status is not None:
            self.watchdog.rank_status.publish("here")
        self._resources.leave()
        if groups:
            self._resources.close_groups()
        settle_all([self._resources])

    def record_last_error(self, error: BaseException | None) -> None:
        """Set the exception of the last forward, to be published if this rank ends now; None after
        a forward without one.
        """
        if self.watchdog.rank_status is not None:
            self.watchdog.rank_status.last_error = "" if error is None else first_line(error)

    def barrier(self) -> None:
        """Wait for all peers."""
        if self.peers is not None:
            self.peers.barrier()

    def broadcast(self, tensor: torch.Tensor, within: FlatMesh | None = None) -> None:
        """Copy the ``tensor`` of the first peer, or of the first rank of ``within``, to every rank
        of them, in place (collective).
        """
        group = self.peers if within is None else within.group
        if group is not None and tensor.numel():
            self.stats.record("broadcast", "", tensor.nbytes)
            group.broadcast(tensor, group.ranks[0])

    def broadcast_object(self, value: Any) -> Any:
        """Return ``value`` of the first peer (collective)."""
        return value if self.peers is None else self.peers.broadcast_object(value)

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        """Return ``value`` of each peer, in the order of :attr:`ranks` (collective)."""
        return [value] if self.peers is None else self.peers.all_gather_object(value, what)

    def store_messages(self, topic: str) -> StoreMessages | None:
        """Return the channel on ``topic`` between background threads of the ranks; None for one
        rank, or if ranks share no store.
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
