"""Parameters cut by tensor or expert parallelism: whole tensors from the parts of all ranks, this
rank's part of a whole tensor, and the names of parameters in the whole model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import ParallelGroups, get_parallel, groups_along
from hf_zero.errors import PartitionError
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import Sharding, sharding_of


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
        parts = [each.chunk(len(ranges), dim) for each in every]
        # with several matrices side by side, each has a part on every rank
        part = torch.cat([each[place] for place in range(len(ranges)) for each in parts], dim)
    return part


def join_named(sharding: Sharding, part: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return :func:`join_parts` of each of the parameters that ranks hold under ``name``."""
    whole, groups = join_parts(sharding, part, name), get_parallel()
    if not sharding.names or groups is None:
        return [whole]
    return list(of_ranks(groups, sharding.axes[0], whole, f"{name} of all ranks"))


def of_ranks(groups: ParallelGroups, axis: str, own: torch.Tensor, key: str) -> torch.Tensor:
    """All-gather ``own`` over the ranks along ``axis``: [ranks, *shape], on the device of ``own``
    (collective over them). The message is sent from the device of ``groups``.
    """
    ranks, sent = groups.along(axis), own.detach().to(groups.device).contiguous()
    every = sent.new_empty(ranks.size * sent.numel())
    ranks.all_gather([(every, sent.view(-1))], key).wait()
    return every.view(ranks.size, *own.shape).to(own.device)


def _parts(box: Box, dim: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Number of ranks that share dimension ``dim``, of which ``box`` holds ``ranges``."""
    return box.whole[dim] // sum(end - start for start, end in ranges)


def dims_of_parts(tensors: Iterable[torch.Tensor]) -> list[MeshDim]:
    """Return the mesh dimensions along which ``tensors`` are cut: a forward with them communicates
    there.
    """
    found: dict[tuple[str, int], MeshDim] = {}
    for sharding in {sharding_of(tensor) for tensor in tensors}:
        named, box = sharding.axes[:1] if sharding.names else (), sharding.box
        cuts = zip(sharding.axes[len(named) :], box.cuts) if box is not None else ()
        sizes = {axis: _parts(box, *cut) for axis, cut in cuts if box is not None}
        for axis in sharding.axes:
            groups = groups_along(axis, sizes[axis]) if axis in sizes else get_parallel()
            if groups is not None and groups.along(axis).size > 1:
                found[axis, groups.along(axis).size] = groups.along(axis)
    return [found[key] for key in sorted(found)]


def own_part(sharding: Sharding, given: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``given`` if that is the whole tensor, else ``given``."""
    box = sharding.box
    if box is None or tuple(given.shape) != box.whole:
        return given
    return box.take(given)  # type: ignore[no-any-return]


# ---- Names in the whole model, where ranks number their experts from 0 ----


class WholeNames:
    """Whole-model names of the parameters and buffers of ``module`` (``Sharding.names``)."""

    def __init__(self, module: nn.Module):
        held = {sharding_of(parameter).names for parameter in module.parameters()} - {()}
        self._modules = {names[0]: names for names in held}
        groups = get_parallel()
        self._rank = groups.coordinate("expert") if held and groups is not None else 0

    def __bool__(self) -> bool:
        """Whether any module differs between ranks."""
        return bool(self._modules)

    def every(self, name: str) -> tuple[str, ...]:
        """Return the whole-model names of ``name``, one a rank; a single one if all are equal."""
        module, dot, _ = name.rpartition(".")
        while dot and self._modules:
            if module in self._modules:
                return tuple(each + name[len(module) :] for each in self._modules[module])
            module, dot, _ = module.rpartition(".")
        return (name,)

    def own(self, name: str) -> str:
        """Return the whole-model name of this rank's ``name``."""
        names = self.every(name)
        return names[self._rank] if len(names) > 1 else name

    def every_of(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return :meth:`every` by name."""
        return {name: self.every(name) for name in names}

    def own_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return :meth:`own` by name."""
        return {name: self.own(name) for name in names}

    def pairs(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the mapping ``names`` of this rank's names for all ranks, in whole-model names."""
        found = (zip(self.every(one), self.every(other)) for one, other in names.items())
        return dict(itertools.chain.from_iterable(found))

    def wholes(self, parameter: torch.Tensor, value: torch.Tensor, name: str) -> Any:
        """Return (name, whole tensor) pairs for all parameters that ranks hold under ``name``;
        ``value`` is this rank's. Collective if it is cut, or the ranks' modules differ.
        """
        return zip(self.every(name), join_named(sharding_of(parameter), value, name), strict=True)
