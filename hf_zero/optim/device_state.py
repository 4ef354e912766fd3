"""The state of segments on the device: arrays over regions of memory, of which the entries of
segments (``segment_entries.py``) have views.

[Note: life of a segment's state] In the words of the methods of ``DeviceState``, and, where state
is offloaded, of ``OffloadedSegments``:

reset
    No entry, and ``Segment.begun`` is False. ``reset_all`` allocates new arrays, at bind and when a
    script drops all state; ``reset`` clears the arrays of one segment, which a load has no state
    for.
created
    Entries with initial values: views of the arrays, and numbers. ``create_for_first_step`` creates
    them for a step, ``create`` for a load or a write of a script. Where the class alone knows its
    initial values, its first step creates tensors of its own. Offloaded entries are created at
    bind, as placeholders.
begun
    ``Segment.begun``: the next step is not a first one. Set by a first step, by a load of a later
    one, and by a script that writes numbers. SGD without momentum creates nothing and does not
    begin: its first step with a momentum sets that to the gradient.
moved
    ``move_into_arrays`` replaces tensors that a first step, or a step of the script's class, has
    put into entries, by views. ``reallocate`` moves whole arrays; the former stay as they are, in
    state dicts that a script keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.ops.coded_arrays import CodedArray, StateArray, decoded
from hf_zero.ops.flat_tiles import PHASE
from hf_zero.optim.elementwise import BEGIN_WITH_GRADIENT
from hf_zero.optim.initial_state import InitialStates, InitialValues, constructor_makes_state
from hf_zero.optim.moment_formats import codec_of
from hf_zero.optim.segment_entries import SegmentStateAccess, copy_of, is_elementwise
from hf_zero.optim.segments import (
    FetchedArrays,
    MemoryRegion,
    Regions,
    Segment,
    masters,
    step_dtype,
)

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


class DeviceState(Regions):
    """One array for each region (``segments.py``) and name of state; the note above tells when. In
    a region with state in blocks of 8 bits, an array is in pieces, one for each span, that are
    allocated by the first step.

    ``base``: the optimizer's class among those with a known update.
    """

    def __init__(self, entries: SegmentStateAccess, base: type | None) -> None:
        super().__init__()
        self.entries, self._initial = entries, InitialStates(entries)
        self._constructor_creates_state = constructor_makes_state(entries.optimizer)
        # whether a throw-away twin shows the values before the first step
        self._initial_is_known = base is not None or self._constructor_creates_state
        # whether the first step sets the momentum to the gradient
        self._momentum_is_first_gradient = base in BEGIN_WITH_GRADIENT
        # whether the first step sets state to what only the class knows
        self.step_creates_state = self._momentum_is_first_gradient or not self._initial_is_known
        self.allocations = 0  # number of arrays allocated so far: they are then at other places

    def _is_in_blocks(self, region: MemoryRegion) -> bool:
        in_8_bits = self.entries.is_in_8_bits
        return bool(self.entries.names_in_8_bits) and any(map(in_8_bits, region.spans))

    def reset_all(self) -> None:
        """Reset all segments to before the first step; entries must have been removed. Allocate the
        arrays of all regions whose initial values are known; the former arrays stay in state dicts
        that a script keeps.
        """
        for segment in self.all_segments:
            segment.begun = False
        first = self._initial.cached()
        dtypes: dict[str, dict[MemoryRegion, torch.dtype]] = {}
        for region in self.regions:
            region.arrays.clear()
            if self._is_in_blocks(region) or not self._initial_is_known:
                continue
            for group in dict.fromkeys(segment.group for segment in region.segments):
                for name, value in first(group, region.segments[0].tensor).items():
                    if is_elementwise(name, value, (1,)):
                        of_name = dtypes.setdefault(name, {})
                        dtype = of_name.get(region, value.dtype)
                        of_name[region] = torch.promote_types(dtype, value.dtype)
        for name, of_name in dtypes.items():
            self._allocate(name, of_name, first)

    def _allocate(
        self, name: str, dtypes: Mapping[MemoryRegion, torch.dtype], first: InitialValues
    ) -> None:
        """Allocate state ``name`` of regions with its initial values. Regions of one dtype and
        device (a stand-in may be in host memory) share a storage, in which each has the alignment
        of its masters: one launch updates all of them.
        """
        self.allocations += 1
        kinds = {r: (dtype, r.segments[0].tensor.device) for r, dtype in dtypes.items()}
        for kind in dict.fromkeys(kinds.values()):
            places: dict[MemoryRegion, int] = {}
            total = 0
            for region in (region for region in dtypes if kinds[region] == kind):
                begin = region.segments[0]
                total += (int(begin.tensor.storage_offset()) - begin.start - total) % PHASE
                places[region] = total
                total += region.numel
            whole = torch.zeros(total, dtype=kind[0], device=kind[1])
            for region, place in places.items():
                array = region.arrays[name] = whole[place : place + region.numel]
                for segment in region.segments:
                    if name not in self.entries.of(segment):
                        value = first(segment.group, segment.tensor).get(name)
                        if value is not None and bool(value):
                            array[segment.start : segment.stop] = value

    def _pieces(self, region: MemoryRegion, name: str, dtype: torch.dtype) -> list[StateArray]:
        """Return state ``name`` of each span of ``region``, in the format of its moments."""
        optimizer, device = self.entries.optimizer, region.segments[0].tensor.device
        codec = codec_of(optimizer, name)
        return [
            codec.zeros(span.stop - span.start, device)
            if codec is not None and self.entries.is_in_8_bits(span)
            else torch.zeros(span.stop - span.start, dtype=dtype, device=device)
            for span in region.spans
        ]

    def create_for_first_step(self, segments: Iterable[Segment]) -> list[Segment]:
        """Create the state of those of ``segments`` that make their first step now. Return those
        whose state only the step itself can create, for :meth:`move_into_arrays` afterwards.
        """
        new = [segment for segment in segments if not segment.begun]
        created_by_step: list[Segment] = []
        first, groups = self._initial.cached(), self.entries.groups
        # a hook before the step may yet change the rate, on which initial values can depend
        hooked = self.entries.optimizer._optimizer_step_pre_hooks and self.entries.bf16 is None
        may_change = hooked and not self._constructor_creates_state
        if self._momentum_is_first_gradient:
            new = [segment for segment in new if groups[segment.group]["momentum"]]
        for segment in new:
            damps = self._momentum_is_first_gradient and groups[segment.group]["dampening"]
            if not self._initial_is_known or may_change or damps or self.entries.of(segment):
                created_by_step.append(segment)
                continue
            self.create(segment, first)
            if self._momentum_is_first_gradient:
                # -0.0 plus a gradient is that gradient, a -0.0 too
                for value in self.entries.elementwise(segment).values():
                    if isinstance(value, Tensor):
                        value.fill_(-0.0)
        for segment in new:
            segment.begun = True
        return created_by_step

    def create(self, segment: Segment, first: InitialValues | None = None) -> None:
        """Create the initial state of ``segment``, if it has none; ``first``: initial values."""
        if self.entries.of(segment):
            return
        first = first or self._initial.cached()
        if segment.begun:  # a script has removed it
            self.reallocate([*segment.region.arrays], first)
        live = self.entries.states[segment.tensor]
        for name, value in first(segment.group, segment.tensor).items():
            if is_elementwise(name, value, (1,)):
                live[name] = self._view(segment, name, value.dtype, first)
                _set(live[name], value)
            else:
                live[name] = copy_of(value)

    def reset(self, segment: Segment) -> None:
        """Reset ``segment`` as if it had never been stepped."""
        segment.begun = False
        if self.entries.states.pop(segment.tensor, None):
            for name in segment.region.arrays:
                _set(self.view(segment, name), 0.0)

    def _view(
        self, segment: Segment, name: str, dtype: torch.dtype, first: InitialValues | None = None
    ) -> StateArray:
        """Return the memory of state ``name`` of ``segment``; allocate the array, with the values
        ``first``, if it is new.
        """
        region = segment.region
        if name not in region.arrays:
            if self._is_in_blocks(region):
                region.arrays[name] = self._pieces(region, name, dtype)
            else:
                self._allocate(name, {region: dtype}, first or self._initial.cached())
        return self.view(segment, name)

    @staticmethod
    def view(segment: Segment, name: str) -> StateArray:
        """Return the entry of state ``name`` of ``segment``."""
        [(_, moment)] = segment.region.moments(name, segment.start, segment.stop)
        return moment

    def reallocate(self, names: Iterable[str], first: InitialValues | None = None) -> None:
        """Move the states ``names`` into new memory: the former stays as it is, in state dicts that
        a script keeps.
        """
        live = self.entries.states
        for name in names:
            first = first or self._initial.cached()
            former = {r: r.arrays[name] for r in self.regions if name in r.arrays}
            own = [
                segment
                for region in former
                for segment in region.segments
                for value in [self.entries.of(segment).get(name)]
                if value is not None and _address(value) == _address(self.view(segment, name))
            ]
            whole = {r: array.dtype for r, array in former.items() if isinstance(array, Tensor)}
            self._allocate(name, whole, first)
            for region, array in former.items():
                if region in whole:
                    region.arrays[name].copy_(array)
                else:
                    region.arrays[name] = deepcopy(array)
            for segment in own:
                live[segment.tensor][name] = self.view(segment, name)

    def put(self, segment: Segment, name: str, at: int, values: Tensor) -> None:
        """Write ``values`` into state ``name`` of ``segment``, starting at element ``at``."""
        live = self.entries.states[segment.tensor]
        if name not in live:
            dtype = step_dtype(segment.tensor.dtype)
            live[name] = self._view(segment, name, dtype)
            _set(live[name], 0.0)
        if isinstance(live[name], CodedArray):
            live[name].put(at, values)
            return
        live[name][at : at + values.numel()].copy_(values)

    def move_into_arrays(self, segments: Iterable[Segment], created_by_step: bool = False) -> None:
        """Move tensors in entries that are not in the arrays there: a step of the script's class
        has assigned them, or, ``created_by_step``, a first step has created them.

        Raises UnsupportedOptimizerError for state that is neither per element nor a scalar.
        """
        live = self.entries.states
        first: InitialValues | None = None
        others = list[tuple[Segment, str, StateArray]]()
        for segment in segments:
            for name, value in self.entries.checked_elementwise(segment).items():
                dtype = torch.float32 if isinstance(value, CodedArray) else value.dtype
                if name not in segment.region.arrays:
                    first = first or self._initial.cached()
                if _address(value) != _address(self._view(segment, name, dtype, first)):
                    others.append((segment, name, value))
        if not created_by_step:
            self.reallocate(dict.fromkeys(name for _, name, _ in others), first)
        for segment, name, value in others:
            own = live[segment.tensor][name] = self.view(segment, name)
            _set(own, value)

    @property
    def all_arrays(self) -> list[Tensor]:
        """The arrays of all regions that are not in pieces."""
        arrays = [array for region in self.regions for array in region.arrays.values()]
        return [array for array in arrays if isinstance(array, Tensor)]

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return the master weights and each per-element state of ``flat`` that has begun, 1-D over
        ``flat.owned``: writable views, or states in new memory if its region has some in 8 bits.
        """
        arrays = {MASTER: masters(flat)}
        parts = self.parts(flat)
        if not parts:
            return arrays
        self.move_into_arrays(segment for segment, _ in parts)
        begun = (name for segment, _ in parts for name in self.entries.elementwise(segment))
        # now: a save decodes on a thread of its own
        pieces = {name: self._moments_of(flat, name) for name in dict.fromkeys(begun)}
        views = {
            name: moment
            for name, of in pieces.items()
            for _, moment in of
            if isinstance(moment, Tensor) and moment.shape == arrays[MASTER].shape
        }
        if views.keys() == pieces.keys():
            return arrays | views
        dtypes = {MASTER: arrays[MASTER].dtype} | {
            name: torch.float32 if isinstance(of[0][1], CodedArray) else of[0][1].dtype
            for name, of in sorted(pieces.items())
        }

        def read(name: str) -> Tensor:
            if name == MASTER:
                return arrays[name]
            out = torch.zeros_like(arrays[MASTER], dtype=dtypes[name])
            for at, moment in pieces[name]:
                values = decoded(moment)
                out[at : at + values.numel()] = values
            return out

        return FetchedArrays(dtypes, read)

    def _moments_of(self, flat: OptimizerShard, name: str) -> list[tuple[int, StateArray]]:
        region, base = self._region_of[flat.key]
        return region.moments(name, base, base + flat.owned[1] - flat.owned[0])

    def memory(self, flat: OptimizerShard) -> list[Tensor]:
        """Return the tensors that hold the per-element states of ``flat``."""
        parts = self.parts(flat)
        if not parts:
            return []
        self.move_into_arrays(segment for segment, _ in parts)
        names = self._region_of[flat.key][0].arrays
        tensors = list[Tensor]()
        for _, moment in (piece for name in names for piece in self._moments_of(flat, name)):
            if isinstance(moment, CodedArray):
                tensors += moment.codes, moment.scales
            else:
                tensors.append(moment)
        return tensors

    def address(self, flat: OptimizerShard, name: str) -> int:
        """Return the address of the first number of state ``name`` of ``flat``; 0 if missing.
        :meth:`arrays` may move it.
        """
        for segment, part in self.parts(flat):
            value = self.entries.of(segment).get(name)
            if value is not None:
                return int(value.data_ptr() + (part.offset - part.start) * value.itemsize)
        return 0


def _address(moment: StateArray) -> int:
    return (moment.codes if isinstance(moment, CodedArray) else moment).data_ptr()


def _set(moment: StateArray, values: StateArray | float) -> None:
    """Overwrite ``moment`` with ``values``, of its shape, or one for all elements: 0 in codes."""
    if isinstance(moment, Tensor):
        moment[:] = values.decode() if isinstance(values, CodedArray) else values
    elif isinstance(values, Tensor) and values.numel() == moment.numel > 1:
        moment.encode(values)
    else:
        none = moment.codec.zeros(moment.numel, moment.codes.device)
        moment.copy_(values if isinstance(values, CodedArray) else none)
