"""The device mesh of one engine: the ranks of each kind of its flat buffers, their shared state,
and the resources of the job that the engine holds on this rank.

[Note: the end of an engine]
``destroy`` closes the process groups at once, except device groups over which another engine may
gather the values that it leaves sharded. A garbage-collected engine may have left collectives
that other ranks still need, or that some of them never join: its groups are aborted and closed when
all ranks have met to make the next engine. Logs and keys end at a time common to all ranks. Each
rank that holds the engine counts in the store; the last one to leave deletes the engine's keys.
Until then the logs stay in the posts of a rank (rank_status.py), where they prove to others that it
issues nothing more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.aborting import abort_together
from hf_zero.distributed.backends import group_backend
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats
from hf_zero.distributed.collectives import DEFAULT_TIMEOUT, MeshDim
from hf_zero.distributed.communicators import NCCL
from hf_zero.distributed.consensus import Consensus
from hf_zero.distributed.flat_mesh import (
    DATA_PARALLEL,
    DimMaker,
    FlatMesh,
    FlatMeshMaker,
    MeshOptions,
    Sums,
)
from hf_zero.distributed.hang_detection import HangDetection, Heartbeats, RankStatus
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import ParallelGroups
from hf_zero.distributed.process_group import default_store, get_rank, get_world_size
from hf_zero.distributed.store import StoreMessages
from hf_zero.distributed.world_group import EngineResources, RankGroup, get_world_group
from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    from hf_zero.distributed.shard_fetches import Serving

T = TypeVar("T")
HOLDERS = "holders"  # ranks that have made the engine and not left it


class MeshResources:
    """The resources of one engine. Holds no reference to the engine itself, and outlives it.

    ``rank_status`` publishes its logs; ``unreleased`` are the resources of this rank that are not
    released yet.
    """

    def __init__(self, rank_status: RankStatus, unreleased: list[EngineResources]):
        self._rank_status, self._unreleased = rank_status, unreleased
        self._store: dist.Store | None = None
        self._server: Serving | None = None
        self._dims: list[MeshDim] = []
        self._groups: list[RankGroup] = []
        self._logs: list[CollectiveLog] = []
        self._abandoned = self._left = False
        self.heartbeats: Heartbeats | None = None  # of which this engine is a holder

    def join(self, store: dist.Store, holders: int) -> None:
        """Hold the keys in ``store``, the engine's own. The first rank of the job counts all
        ``holders`` before any of them can leave.
        """
        self._store = store
        if holders:
            store.add(HOLDERS, holders)

    def serve_by(self, server: Serving) -> None:
        """Hold the thread that uses the store."""
        self._server = server

    def hold(self, *made: MeshDim | RankGroup | CollectiveLog) -> None:
        """Take over process groups with their logs, and logs of groups that others close."""
        for one in made:
            if isinstance(one, MeshDim):
                self._dims.append(one)
                self._logs += [one.gathers, one.reductions]
            elif isinstance(one, RankGroup):
                self._groups.append(one)
                self._logs.append(one.log)
            else:
                self._logs.append(one)

    def abandon(self) -> None:
        """Note that the engine was garbage-collected: :meth:`release` closes what it left open."""
        self._abandoned = True
        for dim in self._dims:
            dim.spare.clear()
        self._unreleased.append(self)

    def close_connections(self) -> None:
        """Destroy the process groups that gathers of values left sharded do without. Idempotent."""
        for dim in self._dims:
            dim.close_connections()

    def close_groups(self) -> None:
        """Destroy the process groups. Idempotent."""
        for dim in self._dims:
            dim.close()
        for group in self._groups:
            group.close()
        self._dims, self._groups = [], []

    def leave(self) -> None:
        """Note that this rank has left the engine, for which it writes no key any more; the last
        one deletes the keys. Idempotent.
        """
        if self._left:
            return
        self._left = True
        self._unreleased.append(self)
        if self._server is not None:
            self._server.end()
        if self.heartbeats is not None:
            self.heartbeats.release()
        if self._store is None:
            return
        try:
            if self._store.add(HOLDERS, -1) == 0:
                for key in self._store.list_keys():
                    self._store.delete_key(key)
        except RuntimeError:
            self._store = None  # the store is gone, and its keys with it

    def release(self) -> None:
        """Release what can be released: the process groups of a garbage-collected engine, and the
        logs of one that all ranks have left.
        """
        if self._abandoned:
            abort_together(dict(item for dim in self._dims for item in dim.aborts().items()))
            self.close_groups()
            self.leave()
        if self._dims or self._used_elsewhere():
            return
        self._rank_status.unregister(self._logs)
        self._logs = []
        self._unreleased[:] = [resources for resources in self._unreleased if resources is not self]

    def _used_elsewhere(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check([HOLDERS]))
        except RuntimeError:
            return False


def release_all(unreleased: Sequence[EngineResources]) -> None:
    """Release what each of ``unreleased`` can."""
    for resources in list(unreleased):
        resources.release()


class Mesh:
    """The ranks of one engine, its peers, and the store in which they agree.

    A flat buffer that only ZeRO cuts is held by all of them, ``shards`` x replicas (:attr:`uncut`).
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
        host_timeout: float = 0.0,
    ):
        self.rank = get_rank()
        self.dims = parallel.dims if parallel is not None else ParallelDims(get_world_size())
        self.ranks = self.dims.ranks_sharing(self.rank)  # the peers, including this rank
        self.pp_stage_ranks = len(self.ranks)
        self.stats = CollectiveStats()
        self.device, self.timeout = device, timeout
        # waiting for a collective blocks the host, no stream
        self.blocks = kinds.is_synchronous(device)
        self._parallel = parallel
        if parallel is not None:
            parallel.wait_at_most(timeout)
        self.job = get_world_group()  # all ranks, also those of other stages of a pipeline
        detection = HangDetection()
        self.consensus: Consensus | None = None
        self.name = "engine"
        logs: dict[str, CollectiveLog] = {}
        unreleased: list[EngineResources] = []
        backend = group_backend(device)
        if self.dims.world > 1 and backend != "fake":
            self.job.wait_at_most(timeout)
            detection, unreleased = self.job.detection, self.job.unreleased
            if options.nccl and backend != NCCL:
                keys = ", ".join(f"nccl.{name}" for name in options.nccl)
                log_rank0(f"{keys} has no effect: the communicators are of {backend}")
        self.watchdog = detection.watchdog
        self._resources = MeshResources(self.watchdog.rank_status, unreleased)
        # before any of them is made: this may fail as well
        weakref.finalize(self, self._resources.abandon).atexit = False
        if self.dims.world > 1 and backend != "fake":
            logs["agreements"] = self._meet(host_timeout)
            release_all(unreleased)
        making = FlatMeshMaker(
            DimMaker(self.rank, device, backend, self.watchdog, timeout, options.nccl),
            self.dims,
            self.name,
            self.stats,
            shards,
            options,
            self._resources,
        )
        self._of = {axes: making.flat_mesh(axes) for axes in options.cuts}
        self.uncut = self._of[()]
        self.peers = self.uncut.group
        stages = parallel.along("pipeline") if parallel is not None else making.alone()
        self.sums = Sums(*making.sums(self.uncut), stages)
        logs |= making.logs | (parallel.logs if parallel is not None else {})
        self.passes = detection.tracker(self.name, self.rank, self.ranks, logs, timeout)

    shard = property(attrgetter("uncut.shard"))
    replicate = property(attrgetter("uncut.replicate"))

    def of(self, axes: tuple[str, ...], partial: bool = False, stages: int = 1) -> FlatMesh:
        """Return the ranks of flat buffers that ``axes`` cut besides ZeRO. ``partial``: each
        tensor-parallel rank has a part of their gradient. ``stages``: number of pipeline stages
        that hold the same values.
        """
        mesh = self._of[axes]
        if partial:
            mesh = replace(mesh, gain=float(self.dims.tensor))
        return replace(mesh, weight=mesh.weight / stages) if stages > 1 else mesh

    def _meet(self, host_timeout: float) -> CollectiveLog:
        """Meet all ranks of the job at the making of an engine, and start heartbeats of this host;
        return the log of the engine's agreements.
        """
        world = self.job
        world.engines += 1
        number = f"engine {world.engines}"
        stage = f" of stage {self.dims.coordinate(self.rank, 'pipeline')}"
        self.name = number + (stage if self.dims.pipeline > 1 else "")
        log = CollectiveLog(
            f"agreements of {self.name}", self.ranks, self.timeout, reports_dead_peers=False
        )
        self.watchdog.rank_status.register(log)
        self._resources.hold(log)
        # of all stages of a pipeline, which share the logs of its messages
        store = dist.PrefixStore(f"{world.prefix}/{number}", default_store())
        self._resources.join(store, self.dims.world if self.rank == 0 else 0)
        if self.pp_stage_ranks > 1:
            self.consensus = Consensus(
                self._store(), self.rank, self.ranks, self.timeout, self.watchdog, log
            )
            self._resources.serve_by(self.consensus.fetches.serving)
        # Making groups blocks in native code, which cannot name a missing rank.
        identity = self.watchdog.rank_status.identity
        identities = world.all_gather_object(identity, f"ranks at the making of {number}")
        exchange = partial(world.all_gather_object, what="hosts")
        self._resources.heartbeats = world.detection.meet(
            identities, exchange, host_timeout, self.timeout
        )
        return log

    def _store(self) -> dist.Store:
        """Return the job's store under the prefix of this engine and stage of a pipeline."""
        name = self.name.replace(" of stage ", "/stage ")
        return dist.PrefixStore(f"{self.job.prefix}/{name}", default_store())

    def hold(self, logs: Sequence[CollectiveLog]) -> None:
        """Keep ``logs``, of other communicators of the engine, for the proofs of other ranks until
        all ranks have left the engine.
        """
        self._resources.hold(*logs)

    def issue_before_others(self, issue: Callable[[], None]) -> None:
        """Have ``issue``, a method whose object is held weakly, called before each collective of
        this rank's engines and of the world group; it issues the collectives of another thread.
        """
        self.job.prior.add(issue)

    @property
    def mesh_dims(self) -> list[MeshDim]:
        """The dimensions over which this engine communicates."""
        of_flats = [
            (m.shard, m.replicate, m.update_dim, m.node, *m.hops) for m in self._of.values()
        ]
        sums = () if self.sums.counted is self.shard else (self.sums.counted,)
        return [dim for dims in (*of_flats, sums) for dim in dims if dim is not None]

    @property
    def parallel_mesh_dims(self) -> list[MeshDim]:
        """The dimensions of activations: tensor, sequence, context, expert and pipeline
        parallelism. Engines of one job may share them.
        """
        return [] if self._parallel is None else [*self._parallel.axes.values()]

    def serve_until_nobody_asks(self) -> None:
        """Return when no lone fetch of another rank reads this rank's shards, soon to be freed."""
        if self.consensus is not None:
            self.consensus.fetches.serve_until_nobody_asks()

    def close(self, groups: bool = True, why: str = "destroyed its engine") -> None:
        """End threads and, with ``groups``, the process groups: this mesh has no collectives any
        more. Without ``groups`` another engine can gather shards, over the default group where
        messages have tags, else over the mesh's own groups, which stay.
        """
        if self.consensus is not None:
            self.consensus.close(why)
        for dim in self.mesh_dims:
            dim.gathers.end(why)
            dim.reductions.end(why)
        self.watchdog.rank_status.post_logs()
        self.passes.close()
        self._resources.leave()
        if groups:
            self._resources.close_groups()
        else:
            self._resources.close_connections()
        release_all([self._resources])

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

    def broadcast_object(self, value: object) -> Any:
        """Return ``value`` of the first peer (collective)."""
        return value if self.peers is None else self.peers.broadcast_object(value)

    def all_gather_object(self, value: T, what: str = "objects") -> list[T]:
        """Return ``value`` of each peer, in the order of :attr:`ranks` (collective)."""
        return [value] if self.peers is None else self.peers.all_gather_object(value, what)

    def largest(self, what: str, value: int) -> int:
        """Return the largest ``value`` of all ranks (collective, outside passes); ``what`` names
        the agreement.
        """
        if self.consensus is None:
            return value
        return self.consensus.gathers.agree(what, (0, value), lambda proposal: "agreement")[1]

    def equal_on_all(self, what: str, value: int) -> bool:
        """Return whether all ranks give the same ``value``, outside passes; False also on a rank
        that alone asks ``what``. Raises RankMismatchError if others ask for something else.
        """
        if self.consensus is None:
            return True
        gathers, values = self.consensus.gathers, [(0, value), (0, -value)]
        try:
            return values == [gathers.agree_or_leave(what, one, lambda _: what) for one in values]
        finally:
            gathers.end_asking()

    def gather_from_stages(self, value: T, what: str) -> list[T]:
        """Return ``value`` of each rank of all stages of a pipeline, which the ranks of a stage
        agree on (collective over all ranks). Without stages: that of this rank alone.
        """
        return [value] if self.dims.pipeline == 1 else self.job.all_gather_object(value, what)

    def store_messages(self, topic: str) -> StoreMessages | None:
        """Return the channel on ``topic`` between background threads of the ranks; None for one
        rank, or if ranks share no store.
        """
        if self.consensus is None:
            return None
        store, status = dist.PrefixStore(topic, self._store()), self.watchdog.rank_status
        return StoreMessages(
            store, self.rank, self.timeout, status.exit_reasons, lambda: status.all_live
        )
