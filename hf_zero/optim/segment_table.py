"""The segments that an optimizer steps: cut from the flat buffers, assigned to its groups, and
split where the step counts of parameters diverge; the scalars that a group shares, its settings in
a checkpoint, and the state of whole tensors.

State of a whole tensor (the factors of Adafactor's second moment) is replicated: every segment of
the tensor, on every rank that has a part of it, keeps all of it with equal values.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import bf16_state, state
from hf_zero.optim import segments as cuts
from hf_zero.optim.cpu_base import CPUOptimizer
from hf_zero.optim.fused import FusedStep
from hf_zero.optim.offloaded_state import OffloadedState
from hf_zero.optim.own_step import choose_fused
from hf_zero.optim.segments import (
    CopiedMaster,
    GroupGradients,
    GroupMember,
    Segment,
    SegmentPart,
    StateArrays,
    masters,
)
from hf_zero.optim.sharded_tensors import extent_of
from hf_zero.optim.state import DeviceState, SegmentStateAccess
from hf_zero.optim.whole_tensor import WHOLE_TENSOR_STATE, WholeTensorOptimizer

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard


changes_of = attrgetter("_version")


class SegmentTable:
    """The segments of one optimizer, with their state on the device and offloaded. ``copied``: keys
    of the flat buffers with copies of their master weights, which writes of a script would miss.
    """

    def __init__(
        self,
        entries: SegmentStateAccess,
        base: type[torch.optim.Optimizer] | None,
        device: DeviceState,
        fused: FusedStep,
        moments: str,
        gradients: GroupGradients,
        copied: Collection[str] = (),
    ) -> None:
        self._optimizer = entries.optimizer
        self.gradients = gradients
        self._copied = copied
        self._base = base
        self._fused = fused
        self._widens = entries.bf16 is not None
        # A step sums over the ranks, so no segment can be stepped without the others.
        self._adds_up = isinstance(entries.optimizer, WholeTensorOptimizer)
        self.device = device
        self.offloaded = OffloadedState(entries, base, moments)
        self.names_in_8_bits: frozenset[str] = frozenset()  # parameters with moments in 8 bits
        self.segments: list[Segment] = []
        self._segment_of: dict[Tensor, Segment] = {}
        # ``group["params"]`` of each group, kept so that no other list can have its id
        self.group_lists: list[list[Tensor]] = []
        self.identities: list[int] = []  # of these lists and their members
        # members whose values have copies elsewhere, and torch's count of their changes
        self.watched: list[Tensor] = []
        self.changes = 0
        self.stepped: list[Segment] = []  # all at once, by the optimizer's step
        # one zero each, for groups that own nothing on this rank
        self.stand_ins: list[Segment] = []
        # those that are in host memory, whatever device the others of their group are on: they are
        # stepped separately
        self.offloaded_stand_ins: list[Segment] = []
        self.excluded_names: frozenset[str] = frozenset()
        self.excluded: list[Segment] = []  # their segments, which other code updates
        # optimizer groups whose parameters have made different numbers of steps on any rank, as
        # far as this rank knows: it left parameters out of a step, or loaded their step counts
        self.diverged: set[int] = set()

    def bind(
        self, flats: Sequence[OptimizerShard], group_of: Mapping[str, int], groups: set[int]
    ) -> None:
        """Cut ``flats`` into segments without state and assign them to the optimizer's groups; each
        of ``groups`` gets at least a stand-in.
        """
        on_device = [flat for flat in flats if not flat.offloaded]
        away = [flat for flat in flats if flat.offloaded]
        self._fused.reset(masters(on_device[0]).device if on_device else None)
        self.device.set_regions(cuts.cut(on_device, group_of))
        self.offloaded.cut(away, group_of)
        segments = self.device.all_segments + self.offloaded.all_segments
        self.stand_ins = []
        for group in sorted(groups - {segment.group for segment in segments}):
            stand_in = Segment(group, 0, 1, [])
            beside = on_device if self._adds_up else [] if away else flats
            zero = masters(beside[0]).new_zeros(1) if beside else torch.zeros(1)
            stand_in.tensor = torch.nn.Parameter(zero, requires_grad=False)
            self.stand_ins.append(stand_in)
        self.segments = segments + self.stand_ins
        self.offloaded.names_in_8_bits = self.names_in_8_bits
        self.offloaded_stand_ins = self.stand_ins if away and not self._adds_up else []
        self.diverged = set()
        dict.clear(self._optimizer.state)  # not SegmentStates.clear, which resets all state
        self._list()
        self._divide_by_format(segments, flats)
        if self._widens:
            self._divide_by_length()
        if self._adds_up:  # each segment must be a part of one tensor
            self.divide(segments, lambda name: name)
        for live in self._optimizer.param_groups:
            choose_fused(self._base, live)
        self.device.allocate(self.stand_ins, self.names_in_8_bits)
        self.offloaded.create_all()

    def _divide_by_format(
        self, segments: Iterable[Segment], flats: Sequence[OptimizerShard]
    ) -> None:
        """Split ``segments`` where parameters with moments in 8 bits begin and end, and between
        flat buffers, which are aligned to blocks each by itself.
        """
        if self.names_in_8_bits:
            formats = {
                slot.name: flat.key
                for flat in flats
                for slot in flat.layout.slots
                if slot.name in self.names_in_8_bits
            }
            self.divide(segments, formats.get)
        if isinstance(self._optimizer, CPUOptimizer):
            self._optimizer.segment_format = self._format_of

    def _divide_by_length(self) -> None:
        """Split the segments on the device that are longer than a batch of widened ones."""
        longest, pieces = bf16_state.WIDENED, {}
        for segment in self.segments:
            if segment.parts and not segment.offloaded:
                positions = range(longest, segment.stop - segment.start, longest)
                pieces[segment] = cuts.split(segment, positions)
        self.replace(pieces)

    def _format_of(self, tensor: Tensor) -> str:
        """Return the format of the moments of the segment ``tensor``."""
        names = self._segment_of[tensor].names
        return "fp32" if self.names_in_8_bits.isdisjoint(names) else "dynamic8"

    def _list(self) -> None:
        """Write the current segments into the optimizer's groups and rebuild the lists by kind."""
        self.stepped = [segment for segment in self.segments if not segment.offloaded]
        if self.offloaded_stand_ins:
            self.stepped = [segment for segment in self.stepped if segment.parts]
        if self.excluded_names or self.excluded:
            self.excluded = [
                s for s in self.stepped if s.parts and not self.excluded_names.isdisjoint(s.names)
            ]
            self.stepped = [s for s in self.stepped if s not in self.excluded]
        self._segment_of = {segment.tensor: segment for segment in self.segments}
        for live in self._optimizer.param_groups:
            live["params"] = []
        for tensor, segment in self._segment_of.items():
            self._optimizer.param_groups[segment.group]["params"].append(tensor)
        self.group_lists = [live["params"] for live in self._optimizer.param_groups]
        self.identities = []
        for tensors in self.group_lists:
            self.identities += id(tensors), *map(id, tensors)
        # a stand-in, too: a script writes to the members of a group on every rank
        self.watched = [
            segment.tensor
            for segment in self.segments
            if (self._copied and not segment.parts)
            or any(part.flat.key in self._copied for part in segment.parts)
        ]
        for segment in self.segments:
            segment.tensor.__class__ = GroupMember
            segment.tensor.gradients = self.gradients  # type: ignore[attr-defined]
        for tensor in self.watched:
            tensor.__class__ = CopiedMaster
        self.changes = sum(map(changes_of, self.watched))

    def parts(
        self, flat: OptimizerShard, first: int = 0, last: int | None = None
    ) -> list[tuple[Segment, SegmentPart]]:
        """Return the parts of ``flat`` with elements ``[first, last)`` of its owned range, in
        order, each with its segment.
        """
        store = self.offloaded if flat.offloaded else self.device
        return store.parts(flat, first, last)

    def state_of(self, segment: Segment) -> DeviceState | OffloadedState:
        """Return the store that keeps the state of ``segment``."""
        return self.offloaded if segment.offloaded else self.device

    def is_unstepped(self, segment: Segment) -> bool:
        """Return whether ``segment`` was never stepped."""
        if segment.offloaded:
            return self.offloaded.is_unstepped(segment)
        return segment.tensor not in self._optimizer.state

    def divide(
        self, segments: Iterable[Segment], kind_of: Callable[[str], Hashable]
    ) -> dict[Segment, list[tuple[Hashable, Segment]]]:
        """Split ``segments``, with their state, wherever a parameter of another kind begins; return
        the pieces of each, with their kinds.
        """
        divided = {segment: cuts.divide(segment, kind_of) for segment in segments}
        self.replace({segment: [piece for _, piece in parts] for segment, parts in divided.items()})
        return divided

    def replace(self, pieces: Mapping[Segment, list[Segment]]) -> None:
        """Replace segments by the pieces they were cut into, with their state."""
        changed = {segment: parts for segment, parts in pieces.items() if len(parts) > 1}
        if changed:
            self._fused.divide()
        for segment, parts in changed.items():
            entries: StateArrays = self._optimizer.state.pop(segment.tensor, {})
            for piece in parts:
                self.state_of(piece).bind(piece)
                start = piece.start - segment.start
                if entries:
                    self._optimizer.state[piece.tensor] = state.narrowed(
                        entries, segment.tensor.shape, start, start + piece.tensor.numel()
                    )
        if changed:
            self.segments = [
                piece for segment in self.segments for piece in changed.get(segment, [segment])
            ]
            self._list()
            self.device.replace(changed)
            self.offloaded.replace(changed)

    def exclude(self, names: frozenset[str]) -> None:
        """Leave the parameters ``names`` to other code (hf_zero/compression): from now on only
        their steps are counted here. Create missing state with its initial values.
        """
        if names == self.excluded_names:
            return
        self.excluded_names = names
        self.divide([s for s in self.segments if s.parts], names.__contains__)
        self._list()
        # each needs a counter of its own from now on
        for segment in self.excluded:
            self.state_of(segment).create(segment)
            entries = self._optimizer.state[segment.tensor]
            if isinstance(entries.get("step"), torch.Tensor):
                entries["step"] = entries["step"].clone()
        self._fused.divide()

    def separate_counters(self) -> None:
        """Give each segment its own step counter: one launch over all of them shares counters."""
        self._fused.separate_counters()

    def count_excluded(self) -> None:
        """Count a step of the parameters that other code updates."""
        for segment in self.excluded:
            self._optimizer.state[segment.tensor]["step"] += 1

    def leave_out(self, segments: Iterable[Segment], unused: frozenset[str]) -> set[Segment]:
        """Return the segments of ``unused`` parameters among ``segments``, split so that they hold
        no others.
        """
        concerned = [segment for segment in segments if not unused.isdisjoint(segment.names)]
        left_out = {segment for segment in concerned if unused.issuperset(segment.names)}
        mixed = [segment for segment in concerned if segment not in left_out]
        self.diverged |= {segment.group for segment in concerned}
        for parts in self.divide(mixed, unused.__contains__).values():
            left_out |= {piece for is_unused, piece in parts if is_unused}
        return left_out


GroupReport = tuple[dict[str, float], dict[str, dict[str, float]]]
"""The scalars of a group on one rank, and the differing scalars of its parameters by name."""


def scalars_of_ranks(reports: Sequence[GroupReport]) -> GroupReport:
    """Return the scalars of a group, and the differing scalars of its parameters by name, from the
    reports of all ranks.
    """
    # Groups that are empty on a rank have no scalars there. Scalars are equal across ranks, except
    # where a parameter was unused in some steps; those ranks report per parameter.
    even = [scalars for scalars, overrides in reports if scalars and not overrides]
    by_name = {name: n for _, overrides in reports for name, n in overrides.items()}
    most = max(by_name.values(), key=lambda n: n.get("step", 0.0), default={})
    scalars = even[0] if even else most
    overrides = {name: n for name, n in by_name.items() if n != scalars or not n}
    return scalars, overrides


class GroupScalars:
    """The scalar states of the groups of one optimizer."""

    def __init__(self, entries: SegmentStateAccess, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        # number of loads of all state from outside; the most steps of a parameter in the last one
        self.loads, self.loaded_steps = 0, 0
        self.writes = 0  # number of writes to per-element state from outside

    def scalars(self) -> list[dict[str, float]]:
        """Return per group the scalars that its parameters share, such as ``{"step": 3.0}``. Equal
        on every rank; :meth:`overrides` has the exceptions.
        """
        out: list[dict[str, float]] = [{} for _ in self._entries.groups]
        # from the first segment of the group that has any: the first step creates state on the
        # device
        for segment in self._table.segments:
            if not out[segment.group]:
                out[segment.group] = self._entries.scalars(segment)
        return out

    def overrides(self) -> list[dict[str, dict[str, float]]]:
        """Return per group, once step counts diverge, the scalar state of each parameter with
        elements on this rank; {} for one never stepped. Stepped parameters without scalars are
        omitted. Never-stepped ones with offloaded state are always listed, since that state exists
        before the first step.
        """
        out: list[dict[str, dict[str, float]]] = [{} for _ in self._entries.groups]
        for segment in self._table.segments:
            unstepped = self._table.is_unstepped(segment)
            diverged = segment.group in self._table.diverged or (unstepped and segment.offloaded)
            # another rank reports on a parameter of which there is only padding here
            if diverged and not segment.is_padding:
                scalars = {} if unstepped else self._entries.scalars(segment)
                if scalars or unstepped:
                    out[segment.group] |= dict.fromkeys(segment.names, scalars)
        return out

    def note_load(
        self,
        scalars: Sequence[Mapping[str, float]],
        overrides: Sequence[Mapping[str, Mapping[str, float]]] = (),
    ) -> None:
        """Record that state with these scalars, equal on all ranks, has replaced the former."""
        entries = [*scalars, *(own for group in overrides for own in group.values())]
        self.loads += 1
        self._table.exclude(frozenset())  # the loaded state may lack theirs
        self.loaded_steps = int(max((entry.get("step", 0) for entry in entries), default=0))

    def load(
        self,
        scalars: Sequence[Mapping[str, float]],
        overrides: Sequence[Mapping[str, Mapping[str, float]]],
    ) -> None:
        """Load the results of :meth:`scalars` and of :meth:`overrides`, which may name parameters
        of any rank; create state that does not exist yet.
        """
        self.note_load(scalars, overrides)
        by_name = {name: values for group in overrides for name, values in group.items()}
        if by_name:
            scalars_of = {name: tuple(sorted(values.items())) for name, values in by_name.items()}
            concerned = [
                segment
                for segment in self._table.segments
                if segment.parts and not segment.names.isdisjoint(by_name)
            ]
            self._table.diverged |= {index for index, group in enumerate(overrides) if group}
            self._table.separate_counters()
            self._table.divide(concerned, scalars_of.get)
        for segment in self._table.segments:
            values = (
                by_name.get(min(segment.names), scalars[segment.group])
                if by_name and segment.parts
                else scalars[segment.group]
            )
            if not values:
                if not segment.parts or (by_name and min(segment.names) in by_name):
                    self._table.state_of(segment).unstep(segment)
                continue
            store = self._table.state_of(segment)
            store.create(segment)
            if store is self._table.offloaded and values.get("step", 1):
                self._table.offloaded.mark_stepped(segment)
            saved_state = self._entries.of(segment)
            for name, scalar in values.items():
                if name not in saved_state:
                    raise UnsupportedOptimizerError(
                        f"optimizer {type(self._entries.optimizer).__name__} keeps no number "
                        f"{name!r} in group {segment.group}; the state was saved by "
                        "another optimizer. Use the same one, or load without optimizer states."
                    )
                if isinstance(saved_state[name], Tensor):
                    saved_state[name].fill_(scalar)
                else:
                    self._entries.optimizer.state[segment.tensor][name] = state.scalar_like(
                        saved_state[name], scalar
                    )


# tensors by parameter and by name of state
TensorsByParameter = Mapping[str, Mapping[str, Tensor]]


def tensor_state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the state of whole tensors that ``optimizer`` may keep."""
    return optimizer.TENSOR_STATE_NAMES if isinstance(optimizer, WholeTensorOptimizer) else ()


class WholeTensorState:
    """The state of whole tensors of one optimizer, as Adafactor's factors and LAMB's ratios."""

    def __init__(self, entries: SegmentStateAccess, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        self.known = tensor_state_names(entries.optimizer)

    def of(self, segment: Segment) -> dict[str, Tensor]:
        """Return the live state of the whole tensor of ``segment``, which must have been stepped or
        be stepped now.
        """
        if not self.known:
            return {}
        live = self._entries.optimizer.state[segment.tensor]
        tensor_state: dict[str, Tensor] = live.setdefault(WHOLE_TENSOR_STATE, {})
        return tensor_state

    def by_parameter(self, firsts: bool = False) -> dict[str, dict[str, Tensor]]:
        """Return the state by parameter; ``firsts``: only if this rank has its first element."""
        by_name = {}
        for segment in self._table.segments if self.known else ():
            start, stop = extent_of(segment) if segment.parts else (0, 0)
            if start < stop and not (firsts and start):
                tensor_state = self._entries.of(segment).get(WHOLE_TENSOR_STATE)
                if tensor_state:
                    by_name[min(segment.names)] = tensor_state
        return by_name

    def load(self, saved: TensorsByParameter) -> None:
        """Load the result of :meth:`by_parameter`, which may have parameters of any rank; reset the
        state of whole tensors of all others.
        """
        for segment in self._table.segments if self.known else ():
            entries = self._entries.of(segment)
            if segment.parts and entries:
                tensor_state = state.copied(saved.get(min(segment.names), {}))
                entry = self._entries.optimizer.state[segment.tensor]
                entry[WHOLE_TENSOR_STATE] = {
                    name: tensor.to(segment.tensor.device, segment.tensor.dtype)
                    for name, tensor in tensor_state.items()
                }

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
