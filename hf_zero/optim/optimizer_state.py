"""The state of an optimizer between steps, as loads and checkpoints see it: per-element state by
flat buffer, scalars and the state of whole tensors by parameter.

State of a whole tensor (the factors of Adafactor's second moment) is replicated: every segment of
the tensor, on every rank that has a part of it, keeps all of it with equal values.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.storage import MASTER
from hf_zero.optim.existing_state import Carried
from hf_zero.optim.initial_state import InitialStates
from hf_zero.optim.members import GroupMembers
from hf_zero.optim.segment_entries import scalar_like
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import masters

if TYPE_CHECKING:
    from hf_zero.zero.layout.training_state import OptimizerShard

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
    """The scalar states of the parameters in the groups of one optimizer."""

    def __init__(self, table: SegmentTable, members: GroupMembers) -> None:
        self._table, self._entries, self._members = table, table.entries, members
        # number of loads of all state from outside; the most steps of a parameter in the last one
        self.loads, self.loaded_steps = 0, 0

    def of_groups(self) -> list[dict[str, float]]:
        """Return per group the scalars of its first parameters, such as ``{"step": 3.0}``; without
        parameters on this rank, those of its stand-in.
        """
        out: list[dict[str, float]] = [{} for _ in self._entries.groups]
        # from the first segment of the group that has any: the first step creates state on the
        # device
        for segment in self._members.segments:
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
        for segment in self._members.segments:
            # other ranks have the parameter of a segment that is only padding
            if any(True for part in segment.parts for _ in part.pieces()):
                unstepped = self._entries.is_unstepped(segment)
                scalars = None if unstepped else self._entries.scalars(segment)
                by_name |= dict.fromkeys(segment.names, scalars)
        return by_name

    def by_parameter(
        self,
        names: Mapping[str, str],
        gather: Callable[[Mapping[str, ParameterScalars]], list[Mapping[str, ParameterScalars]]],
    ) -> dict[str, ParameterScalars]:
        """Return the scalar states (step count) of this rank's parameters that have a group, as the
        ranks with their elements have them; None for one never stepped.

        ``names``: this rank's names -> names in the whole model. ``gather`` returns its argument of
        every rank (collective).
        """
        own_flats = [flat for flat in self._table.flats if flat.spec.saves_shard]  # not of replicas
        reported = {slot.name for flat in own_flats for slot in flat.layout.slots}
        numbers = self.of_parameters().items()
        reports = gather({names[name]: own for name, own in numbers if name in reported})
        known = dict[str, ParameterScalars](ChainMap(*map(dict, reports)))
        # an empty tensor has no elements on any rank
        own = {name: known[whole] for name, whole in names.items() if whole in known}
        shared = [report_of(of)[0] for of in self._by_group(own)]
        return {name: own.get(name, shared[group]) for name, group in self._table.group_of.items()}

    def reports(self, whole: Callable[[str], str]) -> list[GroupReport]:
        """Return the report on the parameters of each group that have elements on this rank;
        ``whole`` returns names in the whole model.
        """
        of_groups = self._by_group(self.of_parameters())
        return [report_of({whole(n): own for n, own in of.items()}) for of in of_groups]

    def _by_group(
        self, scalars: Mapping[str, ParameterScalars]
    ) -> list[dict[str, ParameterScalars]]:
        """Return the ``scalars`` of the parameters of each group."""
        of_groups: list[dict[str, ParameterScalars]] = [{} for _ in self._entries.groups]
        for name, group in self._table.group_of.items():
            if name in scalars:
                of_groups[group][name] = scalars[name]
        return of_groups

    def load(
        self,
        scalars: Mapping[str, ParameterScalars],
        shared: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Load the scalars of parameters, which may be of any rank; one that is missing there
        begins without state. Create state that does not exist yet. ``shared``, by group: those of
        stand-ins; by default those of the parameters with the most steps. Raises
        UnsupportedOptimizerError for a scalar that a group does not keep.
        """
        table, entries = self._table, self._entries
        shared = shared or [report_of(of_group)[0] for of_group in self._by_group(scalars)]
        self.note_load([*shared, *filter(None, scalars.values())])
        kinds = dict[str, Hashable]()
        existing = {segment: frozenset(entries.of(segment)) for segment in self._members.segments}
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

    def __init__(self, table: SegmentTable, members: GroupMembers) -> None:
        self._entries, self._members = table.entries, members
        self.known = table.entries.of_wholes

    def by_parameter(self, firsts: bool = False) -> dict[str, dict[str, Tensor]]:
        """Return the state by parameter; ``firsts``: only if this rank has its first element."""
        by_name = {}
        for segment in self._members.segments if self.known else ():
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
        for segment in self._members.segments if self.known else ():
            if segment.parts and self._entries.of(segment):
                entries = self._entries.states[segment.tensor]
                for name in self.known:
                    entries.pop(name, None)
                for name, tensor in saved.get(min(segment.names), {}).items():
                    like = segment.tensor
                    entries[name] = tensor.to(like.device, like.dtype, copy=True)

    def put(self, name: str, values: Mapping[str, Tensor | None]) -> None:
        """Set the state ``name`` of parameters to ``values``, or remove it where that is None."""
        for segment in self._members.segments:
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
        segments = self._members.segments if self.known else ()
        return sorted({min(segment.names) for segment in segments if segment.parts})


class OptimizerState:
    """The state of the segments in ``table`` by flat buffer, with its parts by parameter:
    ``scalars``, ``tensor_state``.

    Args:
        members: the members of the groups, whose entries a script may have changed.
        carried: the state of whole parameters, to be cut to this rank's elements.
    """

    def __init__(self, table: SegmentTable, members: GroupMembers, carried: Carried) -> None:
        self.table, self.members, self._entries = table, members, table.entries
        self.scalars = GroupScalars(table, members)
        self.tensor_state = WholeTensorState(table, members)
        self.initial, self.device = InitialStates(table.entries), table.device
        self.writes = 0  # number of writes to per-element state from outside
        members.states.restart = self.forget
        if carried.scalars:
            self._load(carried)

    def wait_with(self, wait: Callable[[], object]) -> None:
        """Let reads of the state call ``wait`` first, which waits for the update of offloaded state
        unless the engine itself updates it now.
        """
        self._entries.wait = wait

    def _load(self, carried: Carried) -> None:
        """Load the state that parameters had before they were cut."""
        for flat in self.table.flats:
            for piece in list(flat.layout.pieces(*flat.owned)):
                first = piece.offset - flat.owned[0]
                for kind, whole in carried.per_element.get(piece.name, {}).items():
                    self._load_state(flat, kind, whole[piece.start : piece.stop], first)
        self.scalars.load(carried.scalars)
        self.tensor_state.load(carried.tensor_state)

    def arrays(self, flat: OptimizerShard) -> Mapping[str, Tensor]:
        """Return ``"master"`` and each per-element state of ``flat`` that exists, 1-D over
        ``flat.owned``. On the device these are writable views; offloaded and 8-bit ones may be
        copies, made where they are read, to be changed with :meth:`load_tensor`.
        """
        self.members.take_states()
        table = self.table
        return table.offloaded.arrays(flat) if flat.offloaded else table.device.arrays(flat)

    def tensors(self, flat: OptimizerShard) -> dict[str, Tensor]:
        """Return the :meth:`arrays` of ``flat``, all of them in memory."""
        return dict(self.arrays(flat))

    def existing(self) -> dict[str, set[str]]:
        """Return by parameter the names of the per-element states that exist on this rank."""
        names: dict[str, set[str]] = {}
        for segment in self.members.segments:
            kinds = self._entries.elementwise(segment).keys()
            for name in segment.names if segment.parts and kinds else ():
                if name in self.table.group_of:
                    names.setdefault(name, set()).update(kinds)
        return names

    def load_tensor(self, flat: OptimizerShard, name: str, tensor: Tensor, first: int = 0) -> None:
        """Copy ``tensor`` (1-D) into the masters or a state, from element ``first`` of
        ``flat.owned`` on; create state of these elements that does not exist yet.

        Elements whose group keeps no such state (SGD's momentum may be on in one group only) are
        skipped. As in torch, a momentum that is switched off keeps its state; where it has none,
        values that are all zeros create none. The caller holds ``flat.writing()``.

        Raises:
            UnsupportedOptimizerError: no group keeps a state of that name.
        """
        self.create_offloaded(flat)  # settings of groups may be new
        if name == MASTER:
            flat.store_master(tensor, first)
        else:
            self._load_state(flat, name, tensor, first)

    def _load_state(self, flat: OptimizerShard, name: str, tensor: Tensor, first: int) -> None:
        """Load state ``name`` as :meth:`load_tensor`."""
        self.members.take_states()
        self.writes += 1
        touched = self.table.parts(flat, first, first + tensor.numel())
        for segment, _ in touched:
            if tensor._base is not None and not self._entries.states.get(segment.tensor):
                tensor = tensor.clone()  # a view of arrays, in which the creation of state writes
            self.table.state_of(segment).create(segment)
        having = {segment for segment, _ in touched if name in self._entries.of(segment)}
        if flat.offloaded and touched and len(having) == len(touched):
            self.table.offloaded.load_tensor(flat, name, tensor, first)
            return
        if touched and not (having or self.initial.some_group_keeps(name, masters(flat))):
            have = sorted(
                {key for segment, _ in touched for key in self._entries.elementwise(segment)}
            )
            raise UnsupportedOptimizerError(
                f"optimizer {type(self._entries.optimizer).__name__} keeps no state {name!r} for "
                f"{flat.key!r} (it keeps {have}); the state was saved by another optimizer or with "
                "other options. Use the same optimizer, or load without optimizer states."
            )
        for segment, part in touched:
            start, group = max(part.start, first), segment.group
            values, at = tensor[start - first : part.stop - first], part.offset + start - part.start
            keeps = segment in having or name in self.initial.of_group(group, masters(flat))
            if keeps or (self.initial.is_switched_off(group, name) and bool(values.any())):
                self.table.state_of(segment).put(segment, name, at, values)

    def create_offloaded(self, flat: OptimizerShard) -> bool:
        """Create the missing state of the offloaded ``flat``, with its values before a first step;
        return whether all of its segments already had state with such values. A load calls this
        first, because creation overwrites storage, and torch's ``load_state_dict`` has dropped
        entries.
        """
        return flat.offloaded and self.table.offloaded.create_missing(flat)

    def keeps_errors(self, flat: OptimizerShard) -> bool:
        """Return whether rounding errors of the master weights of ``flat`` are kept."""
        kahan = self._entries.bf16 is not None and self._entries.bf16.kahan
        return kahan and flat.has_master and flat.contents.dtype(MASTER) == torch.bfloat16

    def keeps(self, name: str) -> bool:
        """Return whether a group of this optimizer keeps a state ``name``, or would with a
        momentum, as far as its class shows without a step.
        """
        narrow = self._entries.bf16 is not None and self._entries.bf16.masters
        like = torch.zeros(1, dtype=torch.bfloat16 if narrow else torch.float32)
        return self.initial.some_group_keeps(name, like)

    def forget(self) -> None:
        """Reset all state, offloaded state too, to that before the first step."""
        self.scalars.note_load([])
        self.drop()
        self.table.join({})  # no parameter has been left out of a step
        self.table.offloaded.reset_all()

    def drop(self) -> None:
        """Drop all entries and the state on the device, as a load of torch does, which must follow.
        Offloaded arrays stay, for the load to write to.
        """
        self.members.states.discard()
        self.members.show_states()
        self._entries.states.clear()
        self.table.fused.separate_counters()
        self.table.device.reset_all()

    def writes_on_device(self) -> int:
        """Return torch's count of writes in place to the arrays on the device."""
        return sum(array._version for array in self.device.all_arrays)

    def move_to_device(self, moved: Mapping[str, Callable[[], None]]) -> None:
        """Move the optimizer state of some flat buffers from their offload tier to the device,
        until the engine ends. ``moved``: key of a flat buffer -> function that moves its master
        weights and gradient memory.
        """
        scalars, shared = self.scalars.of_parameters(), self.scalars.of_groups()
        tensor_state, segments = self.tensor_state.by_parameter(), self.table.segments
        not_begun = {name for s in segments if not s.begun for name in s.names}
        # states already on the device are cut anew together with those that move there
        loaded = [flat for flat in self.table.flats if flat.key in moved or not flat.offloaded]
        tensors_of = {flat: self.tensors(flat) for flat in loaded}
        for move in moved.values():
            move()
        self.table.bind()
        self.members.move()
        for flat, tensors in tensors_of.items():
            for name, tensor in tensors.items():
                self.load_tensor(flat, name, tensor)
        self.scalars.load(scalars, shared)
        for segment in self.table.segments:
            exists = segment.offloaded or bool(self._entries.of(segment))
            segment.begun = exists and not_begun.isdisjoint(segment.names)
        self.tensor_state.load(tensor_state)
