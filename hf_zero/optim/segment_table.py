"""The table of the segments that an optimizer steps: cut from the flat buffers, assigned to its
groups, and split where the step counts of parameters diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.optim import state, table, torch_fused
from hf_zero.optim.device_state import DeviceState, StateEntries, replace_segments
from hf_zero.optim.fused import FusedStep
from hf_zero.optim.offloaded_state import OffloadedState
from hf_zero.optim.table import Flat, Segment, masters
from hf_zero.optim.whole_tensor import WholeTensorOptimizer


class SegmentTable:
    """The segments of one optimizer, with their state on the device and offloaded."""

    def __init__(self, entries: StateEntries, base: Any, fused: FusedStep, moments: str) -> None:
        self._optimizer = entries.optimizer
        self._base = base
        self._fused = fused
        # A step sums over the ranks, so no segment can be stepped apart from the others.
        self._adds_up = isinstance(entries.optimizer, WholeTensorOptimizer)
        self.device = DeviceState(entries)
        self.offloaded = OffloadedState(entries, base, moments)
        self.segments: list[Segment] = []
        self.stepped: list[Segment] = []  # all at once, by the optimizer's step
        # one zero each, for groups that own nothing on this rank
        self.stand_ins: list[Segment] = []
        self.resting_names: frozenset[str] = frozenset()
        self.resting: list[Segment] = []  # their segments, which other code updates
        # groups whose parameters, as far as this rank has them, have made different numbers of
        # steps
        self.parted: set[int] = set()

    def bind(self, flats: Sequence[Flat], group_of: Mapping[str, int], groups: set[int]) -> None:
        """Cut ``flats`` into segments without state and assign them to the optimizer's groups; each
        of ``groups`` gets at least a stand-in.
        """
        self._fused.reset()
        here = [flat for flat in flats if not flat.offloaded]
        away = [flat for flat in flats if flat.offloaded]
        self.device.cut(here, group_of)
        self.offloaded.cut(away, group_of)
        regions = [*self.device.regions, *self.offloaded.regions]
        segments = [segment for region in regions for segment in region.segments]
        self.stand_ins = []
        for group in sorted(groups - {segment.group for segment in segments}):
            stand_in = Segment(group, 0, 1, [])
            beside = here if self._adds_up else [] if away else flats
            zero = masters(beside[0]).new_zeros(1) if beside else torch.zeros(1)
            stand_in.tensor = torch.nn.Parameter(zero, requires_grad=False)
            self.stand_ins.append(stand_in)
        self.segments = segments + self.stand_ins
        self.parted = set()
        dict.clear(self._optimizer.state)  # not SegmentStates.clear, which resets all state
        self._list()
        if self._adds_up:  # each segment must be a part of one tensor
            self.divide(segments, lambda name: name)
        for live in self._optimizer.param_groups:
            torch_fused.choose(self._base, live)
        self.offloaded.create_all()

    def carry(self, carried: state.Carried, group_of: Mapping[str, int]) -> None:
        """Give segments their elements of the state that parameters had before they were cut."""
        with_state = {group_of[name] for name in carried.tensors}
        for segment in self.segments:
            scalars = carried.scalars.get(segment.group, {})
            if not scalars and segment.group not in with_state:
                continue
            self.state_of(segment).create(segment)
            live = self._optimizer.state[segment.tensor]
            for name, number in scalars.items():
                live[name] = state.scalar_like(live[name], number) if name in live else number
            for part in segment.parts:
                for key, start, stop, at in part.pieces():
                    for name, whole in carried.tensors.get(key, {}).items():
                        self.state_of(segment).put(segment, name, at, whole[start:stop])

    def _list(self) -> None:
        """Write the current segments into the optimizer's groups and rebuild the lists by kind."""
        self.stepped = [segment for segment in self.segments if not segment.offloaded]
        if self.steps_stand_ins_apart:
            self.stepped = [segment for segment in self.stepped if segment.parts]
        if self.resting_names or self.resting:
            rests = [
                s for s in self.stepped if s.parts and not self.resting_names.isdisjoint(s.names)
            ]
            self.resting = rests
            self.stepped = [segment for segment in self.stepped if segment not in rests]
        for index, live in enumerate(self._optimizer.param_groups):
            live["params"] = [segment.tensor for segment in self.segments if segment.group == index]

    @property
    def steps_stand_ins_apart(self) -> bool:
        """Whether stand-ins are in host memory, whatever device the others of their group are on:
        they are then stepped separately.
        """
        return bool(self.offloaded.regions) and not self._adds_up

    def state_of(self, segment: Segment) -> DeviceState | OffloadedState:
        """Return the store that keeps the state of ``segment``."""
        return self.offloaded if segment.offloaded else self.device

    def divide(
        self, segments: Iterable[Segment], kind_of: Callable[[str], Hashable]
    ) -> dict[Segment, list[tuple[Hashable, Segment]]]:
        """Split ``segments``, with their state, wherever a parameter of another kind begins; return
        the pieces of each, with their kinds.
        """
        divided = {segment: table.divide(segment, kind_of) for segment in segments}
        self.replace({segment: [piece for _, piece in found] for segment, found in divided.items()})
        return divided

    def replace(self, pieces: Mapping[Segment, list[Segment]]) -> None:
        """Replace segments by the pieces they were cut into, with their state."""
        changed = {segment: found for segment, found in pieces.items() if len(found) > 1}
        for segment, found in changed.items():
            entries: Mapping[str, Any] = self._optimizer.state.pop(segment.tensor, {})
            for piece in found:
                self.state_of(piece).bind(piece)
                start = piece.start - segment.start
                if entries:
                    self._optimizer.state[piece.tensor] = state.narrowed(
                        entries, segment.tensor.shape, start, start + piece.tensor.numel()
                    )
        if changed:
            replace_segments([*self.device.regions, *self.offloaded.regions], changed)
            self.segments = [
                piece for segment in self.segments for piece in changed.get(segment, [segment])
            ]
            self._list()
            self._fused.divide()
            self.offloaded.replace(changed)

    def rest(self, names: frozenset[str]) -> None:
        """Leave the parameters ``names`` to other code (hf_zero/compression): from now on only
        their steps are counted here. Create missing state, as of before the first step.
        """
        if names == self.resting_names:
            return
        self.resting_names = names
        self.divide([s for s in self.segments if s.parts], names.__contains__)
        self._list()
        # each needs a counter of its own from now on
        for segment in self.resting:
            self.state_of(segment).create(segment)
            entries = self._optimizer.state[segment.tensor]
            if isinstance(entries.get("step"), torch.Tensor):
                entries["step"] = entries["step"].clone()
        self._fused.divide()

    def count_resting(self) -> None:
        """Count a step of the parameters that other code updates."""
        for segment in self.resting:
            self._optimizer.state[segment.tensor]["step"] += 1

    def leave_out(self, segments: Iterable[Segment], unused: frozenset[str]) -> set[Segment]:
        """Return the segments of ``unused`` parameters among ``segments``, split so that they hold
        no others.
        """
        concerned = [segment for segment in segments if not unused.isdisjoint(segment.names)]
        left_out = {segment for segment in concerned if unused.issuperset(segment.names)}
        mixed = [segment for segment in concerned if segment not in left_out]
        self.parted |= {segment.group for segment in concerned}
        for found in self.divide(mixed, unused.__contains__).values():
            left_out |= {piece for is_unused, piece in found if is_unused}
        return left_out
