"""The segments that an optimizer steps, cut from the flat buffers where the kinds of parameters
change, and assigned to its groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.config.feature_rows import provided
from hf_zero.optim import segments as cuts
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.moment_formats import FormattedOptimizer
from hf_zero.optim.offloaded_segments import OffloadedSegments
from hf_zero.optim.own_step import choose_fused
from hf_zero.optim.segments import MemoryRegion, Segment, SegmentPart, masters, start_of
from hf_zero.optim.step_launch import StepLaunch
from hf_zero.optim.whole_tensor import WholeTensorOptimizer

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


Pieces = Callable[[MemoryRegion], Iterable[Segment]]
"""The segments of a region, in order."""


class SegmentTable:
    """The segments of one optimizer, cut from ``flats`` and assigned to groups by ``group_of``,
    with their state on the ``device`` and offloaded, in the format ``moments``. A reader of their
    state takes them from :attr:`GroupMembers.segments`, with what a script has written.
    """

    def __init__(
        self,
        base: type[torch.optim.Optimizer] | None,
        device: DeviceState,
        fused: StepLaunch,
        moments: str,
        flats: Sequence[OptimizerShard],
        group_of: Mapping[str, int],
    ) -> None:
        entries = self.entries = device.entries
        self._optimizer, self._base, self.fused = entries.optimizer, base, fused
        self._most_widened = None if entries.bf16 is None else entries.bf16.most_widened
        # A step sums over the ranks, so no segment can be stepped without the others.
        self._adds_up = isinstance(entries.optimizer, WholeTensorOptimizer)
        self.device = device
        store = provided("offloaded_state", OffloadedSegments)
        self.offloaded: OffloadedSegments = store(entries, base, moments)
        self.flats, self.group_of = flats, group_of
        self.segments: list[Segment] = []
        self._segment_of: dict[Tensor, Segment] = {}
        self.stepped: list[Segment] = []  # all at once, by the optimizer's step
        # stand-ins in host memory, whatever device the others of their group are on: they are
        # stepped separately
        self.offloaded_stand_ins: list[Segment] = []
        self.bind()

    def bind(self) -> None:
        """Cut the flat buffers, as they are offloaded now, into segments without state and assign
        them to the optimizer's groups; each group of a parameter gets at least a stand-in.
        """
        flats, group_of, names_in_8_bits = self.flats, self.group_of, self.entries.names_in_8_bits
        on_device = [flat for flat in flats if not flat.offloaded]
        away = [flat for flat in flats if flat.offloaded]
        self.fused.reset(masters(on_device[0]).device if on_device else None)
        regions = cuts.cut(on_device, group_of)
        self.offloaded.cut(away, group_of)
        spans = [span for region in regions + self.offloaded.regions for span in region.spans]
        names = {slot.name for flat in flats for slot in flat.layout.slots}
        groups = {group for name, group in group_of.items() if name in names}
        beside = on_device if self._adds_up else [] if away else flats
        like = masters(beside[0]) if beside else torch.zeros(1)
        stand_ins = [
            cuts.stand_in(group, like) for group in sorted(groups - {span.group for span in spans})
        ]
        self.offloaded_stand_ins = stand_ins if away and not self._adds_up else []
        self.device.set_regions(regions + [segment.region for segment in stand_ins])
        if names_in_8_bits:
            # flat buffers are aligned to blocks each by itself
            formats = {
                slot.name: flat.key
                for flat in flats
                for slot in flat.layout.slots
                if slot.name in names_in_8_bits
            }
            for region in self._regions:
                divided = [cuts.divide(span, formats.get) for span in region.spans]
                region.spans = [piece for pieces in divided for _, piece in pieces]
        if isinstance(self._optimizer, FormattedOptimizer):
            self._optimizer.segment_format = self._format_of
        self.entries.states.clear()
        self._cut(self._regions, partial(self._pieces, kind_of={}))
        self._list()
        for index, live in enumerate(self._optimizer.param_groups):
            choose_fused(self._base, live, [s.tensor for s in self.segments if s.group == index])
        self.device.reset_all()
        self.offloaded.create_all()

    @property
    def _regions(self) -> list[MemoryRegion]:
        return self.device.regions + self.offloaded.regions

    def separate(self, segments: Iterable[Segment], names: frozenset[str]) -> None:
        """Cut ``segments`` such that none holds both parameters ``names`` and others."""
        mixed = [
            segment.region
            for segment in segments
            if not (names.isdisjoint(segment.names) or names.issuperset(segment.names))
        ]
        self._divide(mixed, names.__contains__)

    def separate_members(self) -> None:
        """Cut the segments on the device such that each is a part of one parameter."""
        mixed = [s.region for s in self.segments if len(s.names) > 1 and not s.offloaded]
        self._divide(mixed, str)

    def _divide(self, regions: Iterable[MemoryRegion], kind_of: Callable[[str], Hashable]) -> None:
        def pieces(region: MemoryRegion) -> Iterator[Segment]:
            for segment in region.segments:
                yield from (piece for _, piece in cuts.divide(segment, kind_of))

        if self._cut(dict.fromkeys(regions), pieces):
            self.fused.divide()
            self._list()

    def join(self, kind_of: Mapping[str, Hashable]) -> None:
        """Let each segment hold all adjacent parameters of one kind."""
        self.fused.divide(by_segment=False)
        if self._cut(self._regions, partial(self._pieces, kind_of=kind_of)):
            self._list()

    def _cut(self, regions: Iterable[MemoryRegion], pieces_of: Pieces) -> bool:
        """Cut ``regions`` into the segments that ``pieces_of`` returns; return whether any segment
        is new. Those with the same elements as before stay; others get views of the same states.
        """
        changed = False
        for region in regions:
            former = region.segments
            pieces = [*pieces_of(region)]
            by_place = {(segment.start, segment.stop): segment for segment in former}
            replaced = by_place.keys() - {(piece.start, piece.stop) for piece in pieces}
            self.device.move_into_arrays(by_place[p] for p in replaced if not by_place[p].offloaded)
            region.segments = [by_place.pop((s.start, s.stop), s) for s in pieces]
            new = set(region.segments).difference(former)
            changed = changed or bool(new)
            for segment in region.segments:
                if segment in new:
                    segment.bind()
                    if former:
                        at = bisect_right(former, segment.start, key=start_of) - 1
                        self.entries.carry(former[at], segment, self.state_of(segment).view)
            for segment in by_place.values():
                self.entries.states.pop(segment.tensor, None)
        return changed

    def _pieces(self, region: MemoryRegion, kind_of: Mapping[str, Hashable]) -> Iterator[Segment]:
        """Yield the runs of ``region`` of one kind; on the device, each is short enough to be
        widened.
        """
        for span in region.spans:
            pieces = [span]
            if span.parts and (self._adds_up or kind_of):
                # an update over whole tensors needs segments that are parts of one
                kind: Callable[[str], Hashable] = str if self._adds_up else kind_of.get
                pieces = [piece for _, piece in cuts.divide(span, kind)]
            for piece in pieces:
                longest = (None if span.offloaded else self._most_widened) or span.stop
                yield from cuts.split(piece, range(longest, piece.stop - piece.start, longest))

    def _format_of(self, tensor: Tensor) -> str:
        """Return the format of the moments of the segment ``tensor``."""
        return "dynamic8" if self.entries.is_in_8_bits(self._segment_of[tensor]) else "fp32"

    def _list(self) -> None:
        """Rebuild the lists of the current segments by kind."""
        self.segments = self.device.all_segments + self.offloaded.all_segments
        self.stepped = [segment for segment in self.segments if not segment.offloaded]
        if self.offloaded_stand_ins:
            self.stepped = [segment for segment in self.stepped if segment.parts]
        self._segment_of = {segment.tensor: segment for segment in self.segments}

    def parts(
        self, flat: OptimizerShard, first: int = 0, last: int | None = None
    ) -> list[tuple[Segment, SegmentPart]]:
        """Return the parts of ``flat`` with elements ``[first, last)`` of its owned range, in
        order, each with its segment.
        """
        return (self.offloaded if flat.offloaded else self.device).parts(flat, first, last)

    def state_of(self, segment: Segment) -> DeviceState | OffloadedSegments:
        """Return the store that keeps the state of ``segment``."""
        return self.offloaded if segment.offloaded else self.device

    def used_segments(self, flat: OptimizerShard) -> list[Segment]:
        """Return the segments of ``flat``, whose state is offloaded, without those of unused
        parameters.
        """
        unused = flat.gradient.unused
        if unused:
            self.separate(self.offloaded.segments(flat), unused)
        return [s for s in self.offloaded.segments(flat) if not unused.issuperset(s.names)]
