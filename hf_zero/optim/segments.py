"""Segments: the runs of this rank's shards that belong to each optimizer group. Arithmetic and
views only; ``segment_table.py`` keeps the current ones.

The owned range of every flat buffer is cut into runs of one group. Runs that are adjacent in memory
and share a group become one *span*. Flat buffers that share a span form a *region*, a contiguous
stretch of memory with places counted from its first element, over which each state is one array.
*Segments*, the tensors that the optimizer steps, are pieces of spans. They hold no state: its
entries for a segment are views of these arrays, wherever spans are cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from hf_zero.errors import PartitionError
from hf_zero.offload.storage import MASTER
from hf_zero.ops.coded_arrays import StateArray
from hf_zero.zero.layout.flat_layout import FlatLayout

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard

Group = TypeVar("Group", bound=Hashable)

ParamGroup: TypeAlias = Mapping[str, Any]
"""The settings of parameters, as ``torch.optim.Optimizer.param_groups`` has them."""
ParamState: TypeAlias = dict[str, Any]
"""The state of a parameter or segment, as ``torch.optim.Optimizer.state`` has it: tensors, moments
in eight bits (``Blocks``), scalars.
"""
StateArrays: TypeAlias = Mapping[str, Any]
"""The same for reading; a :class:`FetchedArrays` fetches what is read."""


@dataclass(frozen=True)
class Run(Generic[Group]):
    """Elements ``[start, stop)`` of an owned range, counted from its first element; a run of group
    None is not optimized.
    """

    group: Group | None
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class SegmentPart:
    """Elements ``[start, stop)`` of the owned range of ``flat``, at ``offset`` of their segment."""

    flat: OptimizerShard
    start: int
    stop: int
    offset: int

    def parameters(self) -> list[tuple[str, int]]:
        """Return (parameter, place of its first element in the segment) of each parameter in this
        part, as :meth:`FlatLayout.parameters_in`.
        """
        first, layout = self.flat.owned[0] + self.start, self.flat.layout
        parameters = layout.parameters_in(first, first + self.stop - self.start)
        return [(name, self.offset + at - first) for name, at in parameters]

    def pieces(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (parameter, first element, last element + 1, place in the segment) of each
        parameter in this part.
        """
        first = self.flat.owned[0]
        for piece in self.flat.layout.pieces(first + self.start, first + self.stop):
            yield (
                piece.name,
                piece.start,
                piece.stop,
                self.offset + piece.offset - first - self.start,
            )


@dataclass(eq=False)
class Segment:
    """One tensor of one group, of parameters that have made the same steps. ``start`` and ``stop``
    are its place in ``region``. ``begun``: whether it has state after a step, written or loaded; if
    not, its next step is the first, or the first with a momentum (see the note of
    ``device_state.py``).
    """

    region: MemoryRegion
    group: int
    start: int
    stop: int
    parts: list[SegmentPart]
    sub_group: int = 0  # index in the sub-groups of a flat buffer with offloaded state
    begun: bool = False
    tensor: Tensor = field(init=False)

    @cached_property
    def offloaded(self) -> bool:
        """Return whether its state is offloaded: the segment is then one sub-group."""
        return bool(self.parts) and self.parts[0].flat.offloaded

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters of this segment; one of them may have only padding in it."""
        return frozenset(name for part in self.parts for name, _ in part.parameters())

    @property
    def extent(self) -> tuple[int, int]:
        """The range of elements of its tensor, if it is a part of one; empty for padding."""
        pieces = [piece for part in self.parts for piece in part.pieces()]
        starts, stops = [start for _, start, *_ in pieces], [stop for _, _, stop, _ in pieces]
        return min(starts, default=0), max(stops, default=0)

    @cached_property
    def part_of(self) -> dict[str, SegmentPart]:
        """Its part of each flat buffer, by key."""
        return {part.flat.key: part for part in self.parts}

    def extend(self, flat: OptimizerShard, start: int, stop: int) -> None:
        self.parts.append(SegmentPart(flat, start, stop, self.stop - self.start))
        self.stop += stop - start

    def bind(self) -> None:
        """Create the leaf tensor over the masters of the parts: one view, as they are adjacent; a
        placeholder where their storage has no memory.
        """
        if self.offloaded:
            view = self.parts[0].flat.contents.entry(MASTER)[self.start : self.stop]
        else:
            first = masters(self.parts[0].flat)
            view = first.as_strided(
                (self.stop - self.start,), (1,), first.storage_offset() + self.parts[0].start
            )
        self.tensor = torch.nn.Parameter(view.data, requires_grad=False)

    def gradient(self) -> Tensor:
        """Return the gradient of the segment in its own dtype: a view if the gradients of the flat
        buffers are adjacent, else a copy; zeros if it has no parts.

        A flat buffer without a gradient counts as zero; unused parameters are in segments that are
        not stepped.
        """
        if not self.parts:
            return torch.zeros_like(self.tensor)
        shards = [part.flat.gradient.shard for part in self.parts]
        first = shards[0]
        are_adjacent = all(map(adjacent, shards, shards[1:]))
        if first is not None and first.dtype == self.tensor.dtype and are_adjacent:
            return first.detach().as_strided(
                (self.stop - self.start,), (1,), first.storage_offset() + self.parts[0].start
            )
        out = torch.empty_like(self.tensor)
        for part, grad in zip(self.parts, shards):
            target = out[part.offset : part.offset + part.stop - part.start]
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad[part.start : part.stop])
        return out


@dataclass(eq=False)
class MemoryRegion:
    """Flat buffers connected by spans, each with the place of its first owned element; none of a
    stand-in.

    ``spans``: its elements by group and format; ``segments``: the pieces of these that are stepped;
    ``arrays``: state on the device by name, [numel]; moments by span if some are in blocks.
    """

    flats: list[tuple[OptimizerShard, int]]
    numel: int
    spans: list[Segment] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)

    def within(self, segment: Segment) -> list[Segment]:
        """Return the current segments of the elements of ``segment``, which may have been cut."""
        first = bisect_left(self.segments, segment.start, key=start_of)
        return self.segments[first : bisect_left(self.segments, segment.stop, key=start_of)]

    def moments(self, name: str, start: int, stop: int) -> list[tuple[int, StateArray]]:
        """Return state ``name`` of elements ``[start, stop)`` on the device in pieces, each with
        its place.
        """
        array = self.arrays[name]
        if isinstance(array, Tensor):
            return [(0, array[start:stop])]
        at = max(0, bisect_right(self.spans, start, key=start_of) - 1)
        pieces = []
        for span, moment in zip(self.spans[at:], array[at:]):
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                pieces.append((first - start, moment[first - span.start : last - span.start]))
        return pieces


class Regions:
    """The memory regions of the flat buffers of one tier, found by flat buffer."""

    def __init__(self) -> None:
        self.regions: list[MemoryRegion] = []
        self._region_of: dict[str, tuple[MemoryRegion, int]] = {}  # and offset in it

    def set_regions(self, regions: Iterable[MemoryRegion]) -> None:
        """Replace the regions."""
        self.regions = list(regions)
        self._region_of = {
            flat.key: (region, base) for region in self.regions for flat, base in region.flats
        }

    @property
    def all_segments(self) -> list[Segment]:
        """The segments of all regions."""
        return [segment for region in self.regions for segment in region.segments]

    def parts(
        self, flat: OptimizerShard, first: int = 0, last: int | None = None
    ) -> list[tuple[Segment, SegmentPart]]:
        """Return the parts of ``flat`` with elements ``[first, last)`` of its owned range, in
        order, each with its segment.
        """
        if flat.key not in self._region_of:  # no element of it is on this rank
            return []
        region, base = self._region_of[flat.key]
        last = flat.owned[1] - flat.owned[0] if last is None else last
        begin = bisect_right(region.segments, base + first, key=_stop_of)
        end = bisect_left(region.segments, base + last, key=start_of)
        return [(segment, segment.part_of[flat.key]) for segment in region.segments[begin:end]]

    def segments(self, flat: OptimizerShard) -> list[Segment]:
        """Return the segments of ``flat``, in order."""
        return [segment for segment, _ in self.parts(flat)]


start_of, _stop_of = attrgetter("start"), attrgetter("stop")


class FetchedArrays(Mapping[str, Tensor]):
    """Arrays of one flat buffer, [owned] each, by name and with their ``dtypes``, that ``read``
    fetches or decodes at each access: an array takes as much memory as a shard, so none is cached.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], read: Callable[[str], Tensor]) -> None:
        self.dtypes, self._read = dtypes, read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.dtypes:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)


def current_settings(group: ParamGroup) -> dict[str, Any]:
    """Return a snapshot of the settings of ``group``: a scheduler writes a rate that is a tensor in
    place, also while an update on another thread reads it.
    """
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def masters(flat: OptimizerShard) -> Tensor:
    master = flat.master
    if master is None:
        raise PartitionError(
            f"flat {flat.key!r} is trainable and has no master weights; allocate them before "
            "binding the optimizer"
        )
    return master.detach()


def step_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which master weights of ``dtype`` are stepped: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def adjacent(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether ``right`` begins in memory where ``left`` ends."""
    return (
        left is not None
        and right is not None
        and left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and left.storage_offset() + left.numel() == right.storage_offset()
    )


def concatenate(arrays: Sequence[Tensor]) -> Tensor:
    """Return ``arrays``, 1-D, as one: a view if they are adjacent in memory, else a copy."""
    first = arrays[0]
    if len(arrays) == 1:
        return first
    if all(adjacent(a, b) for a, b in pairwise(arrays)):
        return first.as_strided((sum(map(torch.numel, arrays)),), (1,), first.storage_offset())
    return torch.cat([*arrays])


def shares_memory(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors begin at the same place in memory."""
    return left.data_ptr() == right.data_ptr()


def group_runs(
    layout: FlatLayout, owned: tuple[int, int], group_of: Mapping[str, Group]
) -> list[Run[Group]]:
    """Cut an owned range into runs of one group, or of another property of parameters.

    Padding joins the run before it; in front of all it is a run of group None, because optimizers
    of whole tensors expect a tensor at the start of its segment.
    """
    start, stop = owned
    begins: list[tuple[Group | None, int]] = []
    for name, offset in layout.parameters_in(start, stop):
        group = group_of.get(name)
        if not begins and offset > start:
            begins.append((None, 0))
        if not begins or begins[-1][0] != group:
            begins.append((group, offset - start))
    ends = [*(begin for _, begin in begins[1:]), stop - start]
    return [Run(group, begin, end) for (group, begin), end in zip(begins, ends)]


def divide(segment: Segment, kind_of: Callable[[str], Hashable]) -> list[tuple[Hashable, Segment]]:
    """Cut ``segment`` wherever a parameter of another kind begins; return (kind, piece) in order,
    not bound yet.

    Padding joins the piece before it. A segment of one kind is returned itself.
    """
    runs: list[tuple[Hashable, int]] = []  # with the place of its first element
    for part in segment.parts:
        for name, offset in part.parameters():
            kind = kind_of(name)
            if not runs or runs[-1][0] != kind:
                runs.append((kind, offset if runs else 0))
    if len(runs) < 2:
        return [(runs[0][0] if runs else None, segment)]
    return [
        (kind, piece)
        for (kind, _), piece in zip(runs, split(segment, [offset for _, offset in runs[1:]]))
    ]


def split(segment: Segment, places: Sequence[int]) -> list[Segment]:
    """Split ``segment`` at ``places``, ascending and counted from its first element; not bound yet.

    Without places, return the segment itself.
    """
    if not places:
        return [segment]
    pieces = []
    for start, stop in pairwise([0, *places, segment.stop - segment.start]):
        first, last = segment.start + start, segment.start + stop
        piece = Segment(segment.region, segment.group, first, last, [], segment.sub_group)
        for part in segment.parts:
            first, last = max(start, part.offset), min(stop, part.offset + part.stop - part.start)
            if first < last:
                offset = part.start - part.offset
                piece.parts.append(
                    SegmentPart(part.flat, first + offset, last + offset, first - start)
                )
        pieces.append(piece)
    return pieces


def sub_groups(
    layout: FlatLayout, owned: tuple[int, int], group_of: Mapping[str, Hashable], limit: int
) -> list[tuple[int, int]]:
    """Return the runs of :func:`group_runs` as ranges of at most ``limit`` elements."""
    groups = []
    for run in group_runs(layout, owned, group_of):
        groups += [
            (start, min(start + limit, run.stop)) for start in range(run.start, run.stop, limit)
        ]
    return groups


def offloaded_region(flat: OptimizerShard, group_of: Mapping[str, int]) -> MemoryRegion:
    """Return the region of a flat buffer with offloaded states: each of their sub-groups is a
    span.
    """
    region = MemoryRegion([(flat, 0)], flat.owned[1] - flat.owned[0])
    for run in group_runs(flat.layout, flat.owned, group_of):
        for sub_group, (start, stop) in enumerate(flat.contents.sub_groups):
            if run.group is not None and run.start <= start < run.stop:
                part = SegmentPart(flat, start, stop, 0)
                region.spans.append(Segment(region, run.group, start, stop, [part], sub_group))
    return region


def stand_in(group: int, like: Tensor) -> Segment:
    """Return the segment of a group that owns nothing on this rank: a zero, and a region."""
    region = MemoryRegion([], 1)
    segment = Segment(region, group, 0, 1, [])
    region.spans = region.segments = [segment]
    segment.tensor = torch.nn.Parameter(like.new_zeros(1), requires_grad=False)
    return segment


def cut(flats: Sequence[OptimizerShard], group_of: Mapping[str, int]) -> list[MemoryRegion]:
    """Return the regions of ``flats`` on this rank, in the order of memory, with a span for each
    run of one group.
    """
    storages: dict[int, int] = {}
    for flat in flats:
        storages.setdefault(masters(flat).untyped_storage()._cdata, len(storages))

    def place(flat: OptimizerShard) -> tuple[int, int]:
        master = masters(flat)
        return storages[master.untyped_storage()._cdata], int(master.storage_offset())

    regions: list[MemoryRegion] = []
    before: tuple[OptimizerShard, Run[int]] | None = None  # with its last run
    for flat in sorted(flats, key=place):
        runs = group_runs(flat.layout, flat.owned, group_of)
        if not runs:
            continue
        joined = (
            before is not None
            and before[1].group == runs[0].group is not None
            and adjacent(masters(before[0]), masters(flat))
            and adjacent(before[0].gradient.shard, flat.gradient.shard)
        )
        if not joined:
            regions.append(MemoryRegion([], 0))
        region = regions[-1]
        base = region.numel
        region.flats.append((flat, base))
        for run in runs:
            if run.group is not None:
                start = base + run.start
                if not (joined and run is runs[0]):
                    region.spans.append(Segment(region, run.group, start, start, []))
                region.spans[-1].extend(flat, run.start, run.stop)
        region.numel = base + runs[-1].stop
        before = flat, runs[-1]
    return regions
