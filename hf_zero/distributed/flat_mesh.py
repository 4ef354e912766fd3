"""The mesh dimensions of one kind of flat buffer, those that shard it and those that replicate it,
and the process groups made for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from hf_zero.device import kinds
from hf_zero.distributed.backends import issued_as, subgroup_backend_string
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats, PendingCollective
from hf_zero.distributed.collectives import MARGIN_SECONDS, DimGroups, GatherRoute, MeshDim
from hf_zero.distributed.communicators import NCCL, make_group, nccl_options
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.world_group import RankGroup, get_world_group
from hf_zero.errors import ConfigError

# number of hardware queues that the streams of a process share on an NVIDIA GPU
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class DimMaker:
    """Make dimensions for tensors on ``device``; ``watchdog`` watches their waits. ``nccl``: fields
    of the configuration of NCCL's communicators.
    """

    rank: int
    device: torch.device
    backend: str
    watchdog: Watchdog
    timeout: float
    nccl: Mapping[str, int | str] = field(default_factory=dict)

    def make(
        self,
        sets: Sequence[Sequence[int]],
        name: str,
        stats: CollectiveStats,
        num_communicators: int = 2,
        watchdog: Watchdog | None = None,
        shares_communicator: bool = False,
        over: dist.ProcessGroup | None = None,
    ) -> MeshDim:
        """Return the dimension over the one of ``sets`` that contains this rank. Each rank of the
        job is in one of them (collective over all, with the same sets).

        ``name`` names the dimension in messages. ``num_communicators``: 2 for separate
        communicators of gathers and reductions, 1 for gathers alone. ``shares_communicator``:
        reductions use the communicator of the gathers, which needs one common order of both, or
        messages with tags. ``watchdog``: another one for its waits. ``over``: an existing group of
        a larger set of ranks that carries the gathers.

        Raises ConfigError if ranks of NVIDIA GPUs launch through one connection: two communicators
        then wait for each other.
        """
        self._check_connections(sets)
        mine = next(ranks for ranks in sets if self.rank in ranks)
        groups: list[dist.ProcessGroup | None] = [None, None]
        if over is not None and len(mine) > 1:
            groups[0] = over
        elif over is None and any(len(ranks) > 1 for ranks in sets):
            for index in range(num_communicators):
                groups[index] = self._group(sets, mine, name, gathers=not index)
        if shares_communicator:
            groups[1] = groups[0]
        return MeshDim(
            mine,
            self.rank,
            DimGroups(groups[0], groups[1], issued_as(self.backend), self.device),
            stats,
            watchdog or self.watchdog,
            name,
            self.timeout,
        )

    @property
    def tags_messages(self) -> bool:
        """Return whether gathers and reduce-scatters are messages with tags, which tell dimensions
        and collectives apart on the same connections (collectives.py, the note).
        """
        return self.backend == "gloo" and kinds.is_synchronous(self.device)

    def _check_connections(self, sets: Sequence[Sequence[int]]) -> None:
        one = os.environ.get(CONNECTIONS) == "1"
        if one and kinds.is_nvidia(self.device) and any(len(ranks) > 1 for ranks in sets):
            raise ConfigError(
                f"{CONNECTIONS} is 1: all streams of a GPU then share one queue, in which the "
                "gathers and the reductions of two ranks, which are issued in different orders, "
                f"wait for each other for ever; unset it, or export {CONNECTIONS}=8"
            )

    def _group(
        self, sets: Sequence[Sequence[int]], mine: Sequence[int], name: str, gathers: bool
    ) -> dist.ProcessGroup | None:
        """Return the group of ``mine``, this rank's one of ``sets``; None for one rank."""
        limit = timedelta(seconds=self.timeout + MARGIN_SECONDS)
        # Ranks that skip blocks issue gathers and reductions in different orders
        # (reduction_order.py): the streams of the two groups are taken from two pools, and are
        # never the same one (device/streams.py, the note).
        options = nccl_options(self.nccl, gathers, limit) if self.backend == NCCL else None
        several = [ranks for ranks in sets if len(ranks) > 1]
        group = make_group(several, self.rank, self.device, self.backend, limit, options)
        if group is not None:
            connect(group, mine, self.device, self.watchdog, name)
        return group


def connect(
    group: object, ranks: Sequence[int], device: torch.device, watchdog: Watchdog, name: str
) -> None:
    """Create the communicator of ``group``, of ``ranks`` (global), for ``device`` (collective over
    them).

    Communicators are created by their first message, which takes memory and blocks the host: this
    must not happen in a forward or backward. A communicator between two ranks may wait there for
    ranks that have no part in its messages.
    """
    if kinds.is_synchronous(device):
        return
    pending = PendingCollective(f"the communicators of {name}", required=tuple(ranks))
    with watchdog.watching(pending):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


@dataclass(frozen=True, eq=False)
class FlatMesh:
    """The ranks of one kind of flat buffer: sharded along ``shard``, replicated along
    ``replicate``.

    update_dim: the ranks of ``shard`` on a communicator for a thread that gathers updated
    parameters. node: the ranks of ``shard`` within a node, for gathers only. hops: the dimensions
    of two-hop gathers over ``shard``, across nodes and within a node; empty: gathers take one hop.
    group: all ranks that hold the same values, for initial broadcasts; None for one rank. axes: the
    parallel axes that cut it besides ZeRO. weight: factor of a rank's squares in a sum over
    :class:`Sums`, so that each element counts once. gain: further factor of the reduced gradient,
    which is divided by all ranks of the stage: the tensor-parallel size where it applies, else 1.
    """

    shard: MeshDim
    replicate: MeshDim
    update_dim: MeshDim | None = None
    node: MeshDim | None = None
    hops: tuple[MeshDim, ...] = ()
    group: RankGroup | None = None
    axes: tuple[str, ...] = ()
    weight: float = 1.0
    gain: float = 1.0

    @property
    def size(self) -> int:
        """Number of ranks that hold or shard the same values."""
        return self.shard.size * self.replicate.size

    @cached_property
    def sums_twice(self) -> bool:
        """Return whether a sum over its ranks takes one sum along each of two dimensions."""
        return self.shard.size > 1 and self.replicate.size > 1

    @property
    def is_first(self) -> bool:
        """Return whether this rank has index 0 along both dimensions: it reads initial values and
        broadcasts them.
        """
        return self.shard.rank == 0 and self.replicate.rank == 0


class Sums(NamedTuple):
    """The dimensions along which the numbers of all ranks are summed.

    counted: the ranks whose numbers count once each: the shards of one replica, or all peers if
    flat buffers differ in their ranks. repeats: the dimension along which the sums are equal.
    stages: the other stages of a pipeline, whose gradients contribute to the norm.

    Example: four ranks in two replicas of two shards each. Rank 0 sums its numbers along
    ``counted``, ranks 0 and 1; along ``repeats``, ranks 0 and 2, the sums are then equal;
    ``stages`` has rank 0 alone.
    """

    counted: MeshDim
    repeats: MeshDim
    stages: MeshDim


@dataclass(frozen=True)
class MeshOptions:
    """The process groups that an engine needs, equal on all ranks of the job.

    updates: another communicator over the shards, for a thread that gathers updated parameters
    beside all other collectives. node: this many ranks of a shard group form one more dimension,
    for gathers only. hop: gathers over a shard group take ``route`` across nodes of this many ranks
    and within each. cuts: the axes that cut its parameters besides ZeRO (``Sharding.axes``), for
    each kind. nccl: fields of the configuration of NCCL's communicators.
    """

    updates: bool = False
    node: int = 1
    hop: int = 1
    cuts: tuple[tuple[str, ...], ...] = ((),)
    nccl: Mapping[str, int | str] = field(default_factory=dict)
    route: Callable[[MeshDim, MeshDim], GatherRoute] | None = None


DATA_PARALLEL = MeshOptions()


class CommunicatorHolder(Protocol):
    """The holder of communicators, which closes them at the end of an engine."""

    def hold(self, *made: MeshDim | RankGroup) -> None: ...


class FlatMeshMaker:
    """Make the meshes of one engine's flat buffers, on all ranks of the job in the same order.

    ``shards``: size of the shard dimension of buffers held by all peers. ``owner`` holds each
    dimension and group as soon as it is made. :attr:`logs`: the communicators made, by purpose.
    """

    def __init__(
        self,
        maker: DimMaker,
        dims: ParallelDims,
        name: str,
        stats: CollectiveStats,
        shards: int,
        options: MeshOptions,
        owner: CommunicatorHolder,
    ):
        self._owner = owner
        self._maker, self._dims, self._name, self._stats = maker, dims, name, stats
        self._shards, self._options = shards, options
        self.logs: dict[str, CollectiveLog] = {}

    def flat_mesh(self, axes: tuple[str, ...]) -> FlatMesh:
        """Return the mesh of flat buffers that ``axes`` cut besides ZeRO (collective)."""
        kind = f" of {'- and '.join(axes)}-parallel parts" if axes else ""
        sets = self._dims.sets_sharing(axes)
        shards = self._shards
        if axes and shards > 1:
            shards = len(sets[0])
        rows = [ranks[at : at + shards] for ranks in sets for at in range(0, len(ranks), shards)]
        columns = [ranks[start::shards] for ranks in sets for start in range(shards)]
        name, node = f"{self._name}{kind}", self._options.node
        # Each group of gloo connects every rank with every other. Over replicas two are needed: the
        # marks of a step and all-reduces are gloo's own collectives, whose orders may differ.
        tags = self._maker.tags_messages
        shard = self._counted(rows, name, f"{kind}", 1 if tags else 2, shares_communicator=tags)
        over = shard.group if tags else None
        replicate = self._counted(columns, f"{name} across replicas", f" over replicas{kind}")
        update_dim = of_node = None
        if self._options.updates and shards > 1:
            name_of_updates, quiet = f"{name} of updates", self._maker.watchdog.beside()
            update_dim = self._maker.make(rows, name_of_updates, self._stats, 1, quiet, over=over)
            self._owner.hold(update_dim)
        if node > 1:
            nodes = [row[at : at + node] for row in rows for at in range(0, shards, node)]
            of_node = self._counted(nodes, f"{name} in a node", f" in a node{kind}", 1, over=over)
        hops: tuple[MeshDim, ...] = ()
        if self._options.route is not None and 1 < self._options.hop < shards:
            hops = self._hops(rows, name, kind, over)
            shard.gather_over(self._options.route(*hops))
        # sums over all ranks count each replica; sums over one replica's shards do not
        weight = 1.0 / replicate.size if self._dims.splits_model else 1.0
        # The mean divides by all ranks, but only 1 / tensor of them contribute; multiply by
        # ``tensor``.
        gain = float(self._dims.tensor) if "tensor" in axes else 1.0
        group = self._group(axes, name)
        return FlatMesh(shard, replicate, update_dim, of_node, hops, group, axes, weight, gain)

    def _hops(
        self, rows: Sequence[Sequence[int]], name: str, kind: str, over: dist.ProcessGroup | None
    ) -> tuple[MeshDim, MeshDim]:
        """Return the dimensions across the nodes of each of ``rows``, and within them."""
        size = self._options.hop
        across = [row[index::size] for row in rows for index in range(size)]
        within = [row[at : at + size] for row in rows for at in range(0, len(row), size)]
        return (
            self._counted(across, f"{name} across nodes", f" across nodes{kind}", 1, over=over),
            self._counted(within, f"{name} in two hops", f" in two hops{kind}", 1, over=over),
        )

    def _counted(
        self,
        sets: Sequence[Sequence[int]],
        name: str,
        role: str,
        num_communicators: int = 2,
        shares_communicator: bool = False,
        over: dist.ProcessGroup | None = None,
    ) -> MeshDim:
        dim = self._maker.make(
            sets,
            name,
            self._stats,
            num_communicators,
            shares_communicator=shares_communicator,
            over=over,
        )
        self._owner.hold(dim)
        if dim.size > 1:
            for log in (dim.gathers, dim.reductions):
                log.share_prior(get_world_group().prior)
            self.logs |= {f"gathers{role}": dim.gathers, f"reductions{role}": dim.reductions}
        return dim

    def _group(self, axes: tuple[str, ...], name: str) -> RankGroup | None:
        """Return the group of all ranks that hold the same part of values cut by ``axes``, for
        blocking calls; None if it has one rank (collective). ``name`` names its owner in messages.
        """
        sets, group = self._dims.sets_sharing(axes), None
        if len(sets) > 1 and len(sets[0]) > 1:
            limit = timedelta(seconds=self._maker.timeout + MARGIN_SECONDS)
            for ranks in sets:
                new_group = dist.new_group(list(ranks), limit, subgroup_backend_string())
                group = new_group if self._maker.rank in ranks else group
        mine = next(ranks for ranks in sets if self._maker.rank in ranks)
        if len(mine) == 1:
            return None
        part = get_world_group().part(mine, group, self._maker.timeout, name)
        if group is not None:
            self._owner.hold(part)
        return part

    def sums(self, whole: FlatMesh) -> tuple[MeshDim, MeshDim]:
        """Return the dimension along which numbers of all ranks are summed, and the one along which
        the sums are equal (collective).
        """
        if not self._dims.splits_model:
            return whole.shard, whole.replicate
        if whole.replicate.size == 1:  # it is sharded over all ranks
            return whole.shard, self.alone()
        sets = self._dims.sets_sharing()
        return self._counted(sets, f"{self._name} over all ranks", " over all ranks"), self.alone()

    def alone(self) -> MeshDim:
        """Return a dimension of this rank only."""
        maker = self._maker
        groups = DimGroups(None, None, maker.backend, maker.device)
        return MeshDim([maker.rank], maker.rank, groups, self._stats, maker.watchdog, self._name)
