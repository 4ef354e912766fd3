"""Parameters of a model split by tensor or expert parallelism besides ZeRO: the ranks that hold one
and their parts of it, and whole tensors from these parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import ParallelGroups, get_parallel, groups_along
from hf_zero.errors import PartitionError
from hf_zero.zero.layout.box import Box

_ATTRIBUTE = "_hf_zero_sharding"


@dataclass(frozen=True)
class Sharding:
    """The distribution of a parameter over the ranks of its pipeline stage.

    axes: ranks hold different parts along these ("tensor", "expert", or both); all other ranks hold
    the same values, which ZeRO shards or replicates among them. partial: a rank's gradient is one
    term of a sum over the tensor-parallel ranks, as for a whole weight that only this rank's
    attention heads use (a norm of queries, a bias that one rank adds); else all tensor-parallel
    ranks have the same gradient. box: this rank's part of the whole tensor, for checkpoints; None:
    all of it, or not needed. pp_stages: the pipeline stages that hold it, if several: each has a
    part of its gradient. names: set if ranks along the first axis hold parameters of different
    modules under one name: the whole-model names of these modules, by rank, of which the first is
    the name on this rank; the box is for the other axes.
    """

    axes: tuple[str, ...] = ()
    partial: bool = False
    box: Box | None = None
    pp_stages: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.axes not in ((), ("tensor",), ("expert",), ("expert", "tensor")):
            raise ValueError(
                f"a parameter cannot be sharded along {self.axes}; name ('tensor',), ('expert',) "
                "or ('expert', 'tensor')"
            )
        if self.partial and "tensor" in self.axes:
            raise ValueError(
                "the gradient of a parameter that is cut along 'tensor' is complete on its rank; "
                "leave partial out"
            )

    def further(
        self, shape: tuple[int, ...], axis: str, dim: int, rank: int, size: int, packed: int = 1
    ) -> Sharding:
        """Return the sharding of this parameter, of ``shape`` on this rank, after another cut along
        ``axis``: rank ``rank`` of ``size`` keeps its part of dimension ``dim``.

        Raises ValueError if it cannot be cut evenly.
        """
        former = self.box or Box(shape, ())
        box = former.further(dim, rank, size, packed)
        return replace(self, axes=tuple(sorted((*self.axes, axis))), box=box)

    @property
    def kind(self) -> Sharding:
        """The sharding without the place of this rank's part."""
        return self if self.box is None and not self.names else replace(self, box=None, names=())

    @property
    def key(self) -> str:
        """An identifier of the ranks and the average of the gradient; "" if all ranks of the
        pipeline stage hold the parameter and its whole gradient.
        """
        tied = (f"tied {'-'.join(map(str, self.pp_stages))}",) if self.pp_stages else ()
        return "+".join((*self.axes, *(("partial",) if self.partial else ()), *tied))


WHOLE = Sharding()  # the default


def set_sharding(parameter: torch.Tensor, sharding: Sharding) -> None:
    """Set the sharding of ``parameter``, before an engine takes it.

    Raises ValueError if its shape is not that of the box.
    """
    if sharding.box is not None and tuple(parameter.shape) != sharding.box.shape:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is said to be a part of shape "
            f"{sharding.box.shape} of one of shape {sharding.box.whole}; cut the parameter first"
        )
    parameter.__dict__[_ATTRIBUTE] = sharding


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """Return the sharding given to :func:`set_sharding`; :data:`WHOLE` by default."""
    sharding: Sharding = parameter.__dict__.get(_ATTRIBUTE, WHOLE)
    return sharding


def join_parts(sharding: Sharding, part: torch.Tensor, name: str) -> torch.Tensor:
    """Return the whole tensor from ``part`` of each rank along the axes of ``sharding`` (collective
    over them); ``part`` itself if it is not cut.

    Raises PartitionError if the sharding has no box, or this job never had that number of ranks
    along an axis.
    """
    groups = get_parallel()
    axes = sharding.axes[1:] if sharding.names else sharding.axes
    if not axes or groups is None:
        return part
    if sharding.box is None:
        raise PartitionError(
            f"nobody has said which part of {name} each rank along "
            f"{' and '.join(axes)} holds; give its Sharding a box"
        )
    # axes and dimensions are in the same order: experts are the first dimension
    for axis, (dim, ranges) in reversed(list(zip(axes, sharding.box.cuts, strict=True))):
        size = _parts(sharding.box, dim, ranges)
        cut = groups_along(axis, size)
        if cut is None:
            raise PartitionError(
                f"{name} is one of {size} parts along the {axis!r} axis, over which this job was "
                f"never {size} ranks; cut the model in this job, or load it whole"
            )
        every = of_ranks(cut, axis, part, f"{name} (whole)")
        parts = [local.chunk(len(ranges), dim) for local in every]
        # with several matrices side by side, each has a part on every rank
        part = torch.cat([chunks[index] for index in range(len(ranges)) for chunks in parts], dim)
    return part


def join_named(sharding: Sharding, part: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return :func:`join_parts` of each of the parameters that ranks hold under ``name``."""
    whole, groups = join_parts(sharding, part, name), get_parallel()
    if not sharding.names or groups is None:
        return [whole]
    return list(of_ranks(groups, sharding.axes[0], whole, f"{name} of all ranks"))


def of_ranks(groups: ParallelGroups, axis: str, local: torch.Tensor, key: str) -> torch.Tensor:
    """All-gather ``local`` over the ranks along ``axis`` (collective over them): [ranks, *shape],
    on the device of ``local``. The message is sent from the device of ``groups``.
    """
    ranks, sent = groups.along(axis), local.detach().to(groups.device).contiguous()
    every = sent.new_empty(ranks.size * sent.numel())
    ranks.all_gather([(every, sent.view(-1))], key).wait()
    return every.view(ranks.size, *local.shape).to(local.device)


def _parts(box: Box, dim: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Number of ranks that share dimension ``dim``, of which ``box`` holds ``ranges``."""
    return box.whole[dim] // sum(end - start for start, end in ranges)


def dims_of_parts(tensors: Iterable[torch.Tensor]) -> list[MeshDim]:
    """Return the mesh dimensions along which ``tensors`` are cut, and a forward communicates."""
    dims: dict[tuple[str, int], MeshDim] = {}
    for sharding in {sharding_of(tensor) for tensor in tensors}:
        named, box = sharding.axes[:1] if sharding.names else (), sharding.box
        cuts = zip(sharding.axes[len(named) :], box.cuts) if box is not None else ()
        sizes = {axis: _parts(box, *cut) for axis, cut in cuts if box is not None}
        for axis in sharding.axes:
            groups = groups_along(axis, sizes[axis]) if axis in sizes else get_parallel()
            if groups is not None and groups.along(axis).size > 1:
                dims[axis, groups.along(axis).size] = groups.along(axis)
    return [dims[key] for key in sorted(dims)]


def own_part(sharding: Sharding, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, or the argument itself if its shape is another."""
    box = sharding.box
    if box is None or tuple(whole.shape) != box.whole:
        return whole
    return box.take(whole)  # type: ignore[no-any-return]


def take_own_part(
    sharding: Sharding, state: dict[str, object], name: str, errors: list[str]
) -> bool:
    """Replace the whole tensor ``name`` of ``state``, if it is there, by this rank's part. One that
    has the shape of the part is of another model: remove it, add torch's message to ``errors``, and
    return False.
    """
    whole, box = state.get(name), sharding.box
    if not isinstance(whole, torch.Tensor) or box is None:
        return True
    state[name] = own_part(sharding, whole)
    if tuple(whole.shape) != box.shape or box.shape == box.whole:
        return True
    del state[name]
    errors.append(
        f"size mismatch for {name}: copying a param with shape {whole.shape} from checkpoint, the "
        f"shape in current model is {torch.Size(box.whole)}."
    )
    return False
