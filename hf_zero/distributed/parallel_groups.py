"""The parallel axes of a job other than ZeRO's, with the process groups along them, for tensor,
expert, sequence, context and pipeline parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from hf_zero.distributed import process_group
from hf_zero.distributed.backends import group_backend
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats
from hf_zero.distributed.collectives import DEFAULT_TIMEOUT, MeshDim
from hf_zero.distributed.flat_mesh import DimMaker
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.process_group import (
    default_device,
    default_store,
    get_rank,
    get_world_size,
    is_initialized,
)
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError

# without "data": the engine has its own groups over its data-parallel ranks
AXES = ("tensor", "sequence", "context", "sequence_context", "expert", "pipeline")


class ParallelGroups:
    """This rank's groups along the axes of ``dims``, made by the constructor (collective over all
    ranks of the job). Groups of one of ``former`` over the same ranks are reused.
    """

    def __init__(self, dims: ParallelDims, former: Sequence[ParallelGroups] = ()) -> None:
        self.dims, self.rank = dims, get_rank()
        self.device = device = default_device()
        self.stats = {axis: CollectiveStats() for axis in AXES}  # messages along each axis
        self._axes: dict[str, MeshDim] = {}
        backend = group_backend(device) if dims.world > 1 else "gloo"
        shared = dims.world > 1 and backend != "fake"
        watchdog = get_world_group().watchdog if shared else Watchdog()
        maker = DimMaker(self.rank, device, backend, watchdog, DEFAULT_TIMEOUT)
        for axis in AXES:
            sets = dims.sets_along(axis)
            same = next((g for g in former if sets == g.dims.sets_along(axis)), None)
            if same is not None:
                self._axes[axis], self.stats[axis] = same.along(axis), same.stats[axis]
                continue
            if axis == "sequence_context" and 1 in (dims.sequence, dims.context):
                same_ranks = "sequence" if dims.context == 1 else "context"
                self._axes[axis], self.stats[axis] = self._axes[same_ranks], self.stats[same_ranks]
                continue
            name = f"{axis} parallelism"
            # one communicator: the model's graph orders all messages along it
            dim = self._axes[axis] = maker.make(
                sets, name, self.stats[axis], 1, shares_communicator=True
            )
            if shared and dim.size > 1:
                for log in (dim.gathers, dim.reductions):
                    log.share_prior(get_world_group().prior)

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout of waits along each axis to ``seconds``: the ``timeout`` of an engine,
        whose configuration may be known only after the groups were made.
        """
        for dim in self.axes.values():
            dim.wait_at_most(seconds)

    @property
    def axes(self) -> dict[str, MeshDim]:
        """The dimensions by axis, each of them once."""
        first = {id(dim): axis for axis, dim in reversed(self._axes.items())}
        return {axis: dim for axis, dim in self._axes.items() if first[id(dim)] == axis}

    @property
    def logs(self) -> dict[str, CollectiveLog]:
        """The logs of the communicators among the ranks of a pipeline stage, by purpose."""
        axes = {a: dim for a, dim in self.axes.items() if dim.size > 1 and a != "pipeline"}
        gathers = {f"gathers along {axis}": dim.gathers for axis, dim in axes.items()}
        return gathers | {f"reductions along {axis}": m.reductions for axis, m in axes.items()}

    def along(self, axis: str) -> MeshDim:
        """Return the dimension along ``axis``, one of :data:`AXES`: this rank's ranks along it, and
        collectives over them, counted in :attr:`stats` and watched by the watchdog. Of size 1 if
        the job is not parallel along it; its collectives then send nothing.
        """
        return self._axes[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the torch process group along ``axis``, for code of torch or transformers that
        needs one; None for one rank. Messages over it are not counted.
        """
        return self._axes[axis].group

    def coordinate(self, axis: str) -> int:
        """Return the coordinate of this rank along ``axis``."""
        return self.dims.coordinate(self.rank, axis)


# by job, the current groups last
_groups: weakref.WeakKeyDictionary[object, list[ParallelGroups]] = weakref.WeakKeyDictionary()


def init_parallel(dims: ParallelDims) -> ParallelGroups:
    """Make the job parallel along ``dims``: engines made from now on use it. Collective.

    A second call with the same dimensions returns the existing groups; with others it makes groups
    only for axes that change. Engines made before keep theirs. Raises ConfigError if the sizes do
    not multiply to the number of ranks.
    """
    world = get_world_size()
    if dims.world != world:
        raise ConfigError(
            f"{dims} is for {dims.world} ranks, but the job has {world}; use "
            "ParallelDims.over(ranks, tensor=..., ...)"
        )
    if not is_initialized():
        return ParallelGroups(dims)
    stack = _groups.setdefault(default_store(), [])
    groups = next((g for g in stack if g.dims == dims), None)
    if groups is None:
        groups = ParallelGroups(dims, stack)
    stack[:] = [g for g in stack if g is not groups] + [groups]
    return groups


def get_parallel() -> ParallelGroups | None:
    """Return the current groups of :func:`init_parallel`; None if the job is data parallel only."""
    stack = _made()
    return stack[-1] if stack else None


def dims_in_effect() -> ParallelDims:
    """Return the dimensions of the current groups, or those of a data-parallel job."""
    groups = get_parallel()
    return ParallelDims(get_world_size()) if groups is None else groups.dims


def restorer() -> Callable[[], None]:
    """Return a function that makes the groups that are current now the job's again, and closes
    those made since, on all ranks.
    """
    former = list(_made())

    def restore() -> None:
        stack = _made()
        former_dims = {id(along) for g in former for along in g.axes.values()}
        for groups in [g for g in stack if g not in former]:
            for along in groups.axes.values():
                if id(along) not in former_dims:
                    along.close()
        stack[:] = former

    return restore


def groups_along(axis: str, size: int) -> ParallelGroups | None:
    """Return the latest groups with ``size`` ranks along ``axis``; None if the job never had any.
    Models cut among different numbers of ranks may coexist in one job.
    """
    return next((g for g in reversed(_made()) if g.dims.size(axis) == size), None)


def _made() -> list[ParallelGroups]:
    if not is_initialized():
        return []
    return _groups.get(default_store()) or []


def readers() -> tuple[int, int]:
    """Return the number of ranks that read different batches, as far as tensor and pipeline
    parallelism determine it, and the index of this rank among them.
    """
    ranks, rank, groups = process_group.get_world_size(), process_group.get_rank(), get_parallel()
    if groups is not None:
        ranks //= groups.dims.pipeline
        rank %= ranks
    size = 1 if groups is None else groups.dims.tensor
    return ranks // size, rank // size
