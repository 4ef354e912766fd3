"""The segments that an optimizer steps, cut from the flat buffers where the kinds of parameters
change, and assigned to its groups; the scalars of parameters and groups, and the state of whole
tensors.

State of a whole tensor (the factors of Adafactor's second moment) is replicated: every segment of
the tensor, on every rank that has a part of it, keeps all of it with equal values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.config.feature_rows import provided
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import segments as cuts
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.moment_formats import FormattedOptimizer
from hf_zero.optim.offloaded_segments import OffloadedSegments
from hf_zero.optim.own_step import choose_fused
from hf_zero.optim.segment_entries import SegmentStateAccess, nothing, scalar_like
from hf_zero.optim.segments import (
    MemoryRegion,
    Segment,
    SegmentPart,
    masters,
    start_of,
)
from hf_zero.optim.step_launch import StepLaunch
from hf_zero.optim.whole_tensor import WholeTensorOptimizer

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard


Pieces = Callable[[MemoryRegion], Iterable[Segment]]
"""The segments of a region, in order."""


class SegmentTable:
    """The segments of one optimizer, with their state on the device and offloaded. ``take_writes``
    stores what a script has written to ``optimizer.state``.
    """

    def __init__(
        self,
        entries: SegmentStateAccess,
        base: type[torch.optim.Optimizer] | None,
        device: DeviceState,
        fused: StepLaunch,
        moments: str,
    ) -> None:
        self._optimizer, self._entries = entries.optimizer, entries
        self.take_writes: Callable[[], object] = nothing
        self._base = base
        self.fused = fused
        self._most_widened = None if entries.bf16 is None else entries.bf16.most_widened
        # A step sums over the ranks, so no segment can be stepped without the others.
        self._adds_up = isinstance(entries.optimizer, WholeTensorOptimizer)
        self.device = device
        offloaded_state = provided("offloaded_state", OffloadedSegments)
        self.offloaded: OffloadedSegments = offloaded_state(entries, base, moments)
        self.names_in_8_bits: frozenset[str] = frozenset()  # parameters with moments in 8 bits
        self.current: list[Segment] = []
        self._segment_of: dict[Tensor, Segment] = {}
        self.stepped: list[Segment] = []  # all at once, by the optimizer's step
        # stand-ins in host memory, whatever device the others of their group are on: they are
        # stepped separately
        self.offloaded_stand_ins: list[Segment] = []

    def bind(
        self, flats: Sequence[OptimizerShard], group_of: Mapping[str, int], groups: set[int]
    ) -> None:
        """Cut ``flats`` into segments without state and assign them to the optimizer's groups; each
        of ``groups`` gets at least a stand-in.
        """
        on_device = [flat for flat in flats if not flat.offloaded]
        away = [flat for flat in flats if flat.offloaded]
        self.fused.reset(masters(on_device[0]).device if on_device else None)
        self.device.names_in_8_bits = self.offloaded.names_in_8_bits = self.names_in_8_bits
        regions = cuts.cut(on_device, group_of)
        self.offloaded.cut(away, group_of)
        spans = [span for region in regions + self.offloaded.regions for span in region.spans]
        beside = on_device if self._adds_up else [] if away else flats
        like = masters(beside[0]) if beside else torch.zeros(1)
        stand_ins = [
            cuts.stand_in(group, like) for group in sorted(groups - {span.group for span in spans})
        ]
        self.offloaded_stand_ins = stand_ins if away and not self._adds_up else []
        self.device.set_regions(regions + [segment.region for segment in stand_ins])
        if self.names_in_8_bits:
            # flat buffers are aligned to blocks each by itself
            formats = {
                slot.name: flat.key
                for flat in flats
                for slot in flat.layout.slots
                if slot.name in self.names_in_8_bits
            }
            for region in self._regions:
                divided = [cuts.divide(span, formats.get) for span in region.spans]
                region.spans = [piece for pieces in divided for _, piece in pieces]
        if isinstance(self._optimizer, FormattedOptimizer):
            self._optimizer.segment_format = self._format_of
        self._entries.states.clear()
        self._cut(self._regions, partial(self._pieces, kind_of={}))
        self._list()
        for index, live in enumerate(self._optimizer.param_groups):
            choose_fused(self._base, live, [s.tensor for s in self.current if s.group == index])
        self.device.reset_all()
        self.offloaded.create_all()

    @property
    def segments(self) -> list[Segment]:
        """The current segments, with what a script has written."""
        self.take_writes()
        return self.current

    @property
    def _regions(self) -> list[MemoryRegion]:
        return self.device.regions + self.offloaded.regions

    # ---- cuts ----

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
        mixed = [s.region for s in self.current if len(s.names) > 1 and not s.offloaded]
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
                        self._entries.carry(former[at], segment, self.state_of(segment).view)
            for segment in by_place.values():
                self._entries.states.pop(segment.tensor, None)
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
        names = self._segment_of[tensor].names
        return "fp32" if self.names_in_8_bits.isdisjoint(names) else "dynamic8"

    def _list(self) -> None:
        """Rebuild the lists of the current segments by kind."""
        self.current = self.device.all_segments + self.offloaded.all_segments
        self.stepped = [segment for segment in self.current if not segment.offloaded]
        if self.offloaded_stand_ins:
            self.stepped = [segment for segment in self.stepped if segment.parts]
        self._segment_of = {segment.tensor: segment for segment in self.current}

    def parts(
        self, flat: OptimizerShard, first: int = 0, last: int | None = None
    ) -> list[tuple[Segment, SegmentPart]]:
        """Return the parts of ``flat`` with elements ``[first, last)`` of its owned range, in
        order, each with its segment.
        """
        self.take_writes()
        store = self.offloaded if flat.offloaded else self.device
        return store.parts(flat, first, last)

    def state_of(self, segment: Segment) -> DeviceState | OffloadedSegments:
        """Return the store that keeps the state of ``segment``."""
        return self.offloaded if segment.offloaded else self.device

    def is_unstepped(self, segment: Segment) -> bool:
        """Return whether ``segment`` was never stepped: torch would have no entry for it.

        ``not segment.begun`` says less: that the next step is a first one. On the device a load of
        a state at step 0 creates entries and does not begin them; a script may remove the entries
        of a segment that has begun. Offloaded, entries exist from the bind on.
        """
        if segment.offloaded:
            return not segment.begun
        return segment.tensor not in self._entries.states


ParameterScalars = dict[str, float] | None
"""The scalar states of one parameter; None: it has made no step."""
GroupReport = tuple[dict[str, float], dict[str, dict[str, float]]]
"""The scalars of parameters: those of the ones with the most steps, and those of others by name; {}
for one that has made no step.
"""


def report_of(scalars: Mapping[str, ParameterScalars]) -> GroupReport:
    """Return the report of the parameters of a group; :func:`scalars_in` reads it."""
    stepped = [own for own in scalars.values() if own is not None]
    shared = max(stepped, key=lambda own: own.get("step", 0.0), default={})
    return shared, {n: own or {} for n, own in scalars.items() if own is None or own != shared}


def scalars_in(report: GroupReport, name: str) -> ParameterScalars:
    """Return the scalars of parameter ``name`` in ``report``, which must be about it."""
    shared, others = report
    return (others[name] or None) if name in others else shared


class GroupScalars:
    """The scalar states of the groups of one optimizer."""

    def __init__(self, entries: SegmentStateAccess, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        # number of loads of all state from outside; the most steps of a parameter in the last one
        self.loads, self.loaded_steps = 0, 0
        self.writes = 0  # number of writes to per-element state from outside

    def scalars(self) -> list[dict[str, float]]:
        """Return per group the scalars of its first parameters, such as ``{"step": 3.0}``; without
        parameters on this rank, those of its stand-in.
        """
        out: list[dict[str, float]] = [{} for _ in self._entries.groups]
        # from the first segment of the group that has any: the first step creates state on the
        # device
        for segment in self._table.segments:
            if not out[segment.group]:
                out[segment.group] = self._entries.scalars(segment)
        return out

    def note_load(self, scalars: Iterable[Mapping[str, float]]) -> None:
        """Record that state with these scalars, equal on all ranks, has replaced the former."""
        self.loads += 1
        self.loaded_steps = int(max((entry.get("step", 0) for entry in scalars), default=0))

    def of_parameters(self) -> dict[str, ParameterScalars]:
        """Return the scalars of each parameter with elements on this rank."""
        by_name = dict[str, ParameterScalars]()
        for segment in self._table.segments:
            # other ranks have the parameter of a segment that is only padding
            if any(True for part in segment.parts for _ in part.pieces()):
                unstepped = self._table.is_unstepped(segment)
                scalars = None if unstepped else self._entries.scalars(segment)
                by_name |= dict.fromkeys(segment.names, scalars)
        return by_name

    def load(
        self,
        scalars: Mapping[str, ParameterScalars],
        shared: Sequence[Mapping[str, float]],
    ) -> None:
        """Load the scalars of parameters, which may be of any rank; one that is missing there
        begins without state. Create state that does not exist yet. ``shared``, by group: those of
        stand-ins.
        """
        table, entries = self._table, self._entries
        self.note_load([*shared, *filter(None, scalars.values())])
        kinds = dict[str, Hashable]()
        existing = {segment: frozenset(entries.of(segment)) for segment in table.segments}
        for segment, states in existing.items():
            for name in segment.names:
                own = scalars.get(name)
                numbers = None if own is None else tuple(sorted(own.items()))
                begins = own is not None and (segment.begun or bool(own and own.get("step", 1)))
                kinds[name] = states, numbers, begins
        table.join(kinds)
        for segment in table.segments:
            store = table.state_of(segment)
            values = scalars.get(min(segment.names)) if segment.parts else shared[segment.group]
            if values is None or not (values or segment.parts):
                store.reset(segment)
                continue
            if not values:
                continue
            store.create(segment)
            segment.begun = segment.begun or bool(values.get("step", 1))
            saved_state = entries.of(segment)
            for name, scalar in values.items():
                if name not in saved_state:
                    raise UnsupportedOptimizerError(
                        f"optimizer {type(entries.optimizer).__name__} keeps no number "
                        f"{name!r} in group {segment.group}; the state was saved by "
                        "another optimizer. Use the same one, or load without optimizer states."
                    )
                if isinstance(saved_state[name], Tensor):
                    saved_state[name].fill_(scalar)
                else:
                    entries.states[segment.tensor][name] = scalar_like(saved_state[name], scalar)


# tensors by parameter and by name of state
TensorsByParameter = Mapping[str, Mapping[str, Tensor]]


class WholeTensorState:
    """The state of whole tensors of one optimizer, as Adafactor's factors and LAMB's ratios."""

    def __init__(self, entries: SegmentStateAccess, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        self.known = entries.of_wholes

    def by_parameter(self, firsts: bool = False) -> dict[str, dict[str, Tensor]]:
        """Return the state by parameter; ``firsts``: only if this rank has its first element."""
        by_name = {}
        for segment in self._table.segments if self.known else ():
            start, stop = segment.extent if segment.parts else (0, 0)
            if start < stop and not (firsts and start):
                entries = self._entries.of(segment)
                tensor_state = {name: entries[name] for name in self.known if name in entries}
                if tensor_state:
                    by_name[min(segment.names)] = tensor_state
        return by_name

    def load(self, saved: TensorsByParameter) -> None:
        """Load the result of :meth:`by_parameter`, which may have parameters of any rank; reset the
        state of whole tensors of all others.
        """
        for segment in self._table.segments if self.known else ():
            if segment.parts and self._entries.of(segment):
                entries = self._entries.states[segment.tensor]
                for name in self.known:
                    entries.pop(name, None)
                for name, tensor in saved.get(min(segment.names), {}).items():
                    like = segment.tensor
                    entries[name] = tensor.to(like.device, like.dtype, copy=True)

    def put(self, name: str, values: Mapping[str, Tensor | None]) -> None:
        """Set the state ``name`` of parameters to ``values``, or remove it where that is None."""
        for segment in self._table.segments:
            if segment.parts and min(segment.names) in values and self._entries.of(segment):
                value = values[min(segment.names)]
                entries = self._entries.states[segment.tensor]
                if value is None:
                    entries.pop(name, None)
                else:
                    entries[name] = value.clone()

    @property
    def names(self) -> list[str]:
        """The parameters with elements on this rank that may have state of whole tensors."""
        return sorted(
            {
                min(segment.names)
                for segment in (self._table.segments if self.known else ())
                if segment.parts
            }
        )
