"""``optimizer.state`` under an engine, by member of the optimizer's groups, as a script of torch
expects it. The state itself is in arrays and in entries by segment
(``segment_entries.py``): an entry here is made of them where it is read, and what a script writes
to it is stored before the engine uses the state next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zero.errors import PartitionError
from hf_zero.ops.coded_arrays import CodedArray
from hf_zero.optim.initial_state import InitialStates
from hf_zero.optim.pre_step_hooks import PreStepHooks
from hf_zero.optim.segment_entries import (
    copy_of,
    is_elementwise,
    is_scalar,
    nothing,
    refuse_unknown,
    scalar_like,
)
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import ParamState, Segment, concatenate, shares_memory
from hf_zero.optim.snapshots import MemberPart
from hf_zero.optim.state_by_member import StateUses

Piece = tuple[Segment, int, int]
"""Elements ``[first, last)`` of a segment."""


class _Shown(NamedTuple):
    """A value as it was read: ``version`` of a copy, of which writes are stored; ``dtype`` of an
    array, None for a number and for the state of a whole tensor.
    """

    value: Any
    version: int | None
    dtype: torch.dtype | None


class _Written(NamedTuple):
    """What a script has written to the state of a member: ``values`` by name; the arrays among them
    that were ``replaced`` by others; whether the member is to be stepped ``apart`` from others.
    """

    values: ParamState
    replaced: list[str]
    apart: bool


class MemberState(MutableMapping[str, Any]):
    """The state of a member by name: views of the arrays, copies of what is offloaded to files or
    in fewer bits, and copies of numbers.
    """

    def __new__(cls, states: Any, member: Tensor | None = None) -> Any:
        # libraries map values of collections, and call the class with the result
        return dict(states) if member is None else super().__new__(cls)

    def __init__(self, states: MemberStates, member: Tensor) -> None:
        self._states: MemberStates | None = states
        self.member = member
        self.values_by_name: dict[str, Any] = {}
        self.shown: dict[str, _Shown] = {}  # as it is stored, of which writes are told
        self.is_removed = False

    def _now(self) -> dict[str, Any]:
        """Return the values by name, read anew if the engine has used the state since."""
        if self._states is not None:
            self._states.show(self)
        return self.values_by_name

    def detach(self) -> None:
        """End the link with the state: the script has removed or replaced the entry."""
        self._states = None

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        now = self._now()
        if self._states is not None:
            self._states.uses.before_write()
        del now[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def update(self, *others: Any, **named: Any) -> None:
        """Set values; none if one of them is refused."""
        now, values = self._now(), dict(*others, **named)
        if self._states is not None:
            self._states.check(self, values)
        now.update(values)

    def copy(self) -> ParamState:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class MemberStates(MutableMapping[Any, Any]):
    """The state of the members of groups, of those that have begun. Members without elements on
    this rank have arrays without elements once their group has begun here.

    ``members`` of each group, and their ``parts``: those that train; other keys have plain entries.
    :meth:`watch` says what a script's uses call.
    """

    def __init__(
        self,
        table: SegmentTable,
        members: Sequence[Sequence[Tensor]],
        parts: Sequence[Sequence[MemberPart]],
    ) -> None:
        self._access, self._table, self._groups = table.entries, table, (members, parts)
        self.run_hooks = PreStepHooks(self, table).run
        self.uses = StateUses(nothing)
        self._entries: dict[Any, MemberState] = {}
        self._others = defaultdict[Any, ParamState](dict)  # of no member that trains
        # entries that were read, or written to, since the engine has used the state last
        self.open: dict[Any, MemberState] = {}

    def watch(self, uses: StateUses) -> None:
        """Let a script's uses call ``uses``."""
        self.uses = uses

    @cached_property
    def parts(self) -> dict[Any, tuple[MemberPart, int]]:
        """The part that is each member that trains, and its group."""
        members, parts = self._groups
        return {
            member: (part, group)
            for group in range(len(members))
            for member, part in zip(members[group], parts[group])
            if part.flat is not None
        }

    def _before_use(self, *keys: object) -> None:
        """Refuse ``keys`` that never have an entry, and wait for an update of offloaded state."""
        for key in keys:
            self.uses.refuse(key)
        self.uses.wait()

    def __getitem__(self, key: Any) -> Any:
        self._before_use(key)
        if key not in self.parts:
            return self._others[key]
        if key in self.open and self.open[key].is_removed:
            return self._replace(key, {})
        if key not in self._entries:
            self._entries[key] = MemberState(self, key)
        self.show(self._entries[key])
        return self._entries[key]

    def __contains__(self, key: object) -> bool:
        self._before_use(key)
        return self._has(key)

    def _has(self, key: object) -> bool:
        """Return whether ``key`` has an entry now."""
        if key not in self.parts:
            return key in self._others
        if key in self.open:
            return not self.open[key].is_removed
        return self._state(key)[1] is not None

    def __setitem__(self, key: Any, state: Mapping[str, Any]) -> None:
        self._before_use(key)
        if key not in self.parts:
            self._others[key] = dict(state)
            return
        former = self[key]
        self.check(former, state)
        self._replace(key, dict(state))

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if key not in self.parts:
            del self._others[key]
            return
        self.uses.before_write()
        self[key]
        self._replace(key, {}).is_removed = True

    def _replace(self, key: Any, state: ParamState) -> MemberState:
        """Let the entry of ``key`` be a new one, which has ``state``."""
        former = self._entries[key]
        former.detach()
        entry = self._entries[key] = self.open[key] = MemberState(self, key)
        entry.values_by_name = state
        entry.shown = {
            name: _Shown(_NONE, None, shown.dtype) for name, shown in former.shown.items()
        }
        return entry

    def __iter__(self) -> Iterator[Any]:
        self._before_use()
        return iter([*filter(self._has, self.parts), *self._others])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default or {}
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        state = dict(self[key]) if key in self else {}
        del self[key]
        return state

    def popitem(self) -> tuple[Any, Any]:
        keys = [*self]
        if not keys:
            raise KeyError("popitem(): dictionary is empty")  # as torch's own dictionary
        return keys[-1], self.pop(keys[-1])

    def replace(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let ``states`` be the state of all members; none if one of them is refused."""
        for key, state in states.items():
            if key in self.parts:
                self.check(self[key], state)
        for key in [key for key in self if key not in states]:
            del self[key]
        self.update(states)

    def clear(self) -> None:
        self._before_use()
        self.uses.restart()

    def __repr__(self) -> str:
        return repr({key: dict(state) for key, state in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, ([(key, dict(state)) for key, state in self.items()],)

    def pieces(self, part: MemberPart) -> list[Piece]:
        """Return the elements of ``part`` by segment, in order."""
        assert part.flat is not None
        if part.start == part.stop:
            return []
        pieces = []
        store = self._table.offloaded if part.flat.offloaded else self._table.device
        for segment, of_flat in store.parts(part.flat, part.start, part.stop):
            shift = of_flat.offset - of_flat.start
            first, last = max(of_flat.start, part.start), min(of_flat.stop, part.stop)
            pieces.append((segment, first + shift, last + shift))
        return pieces

    def _state(self, member: Any) -> tuple[list[Piece], Segment | None]:
        """Return the pieces of ``member``, and the first segment that has begun of these, or of its
        group if it has no elements here.
        """
        part, group = self.parts[member]
        pieces = self.pieces(part)
        if pieces:
            candidates = [pieces[0][0]]
        else:
            candidates = [segment for segment in self._table.segments if segment.group == group]
        begun = (s for s in candidates if not self._access.is_unstepped(s) and self._access.of(s))
        return pieces, next(begun, None)

    def show(self, entry: MemberState) -> None:
        """Read ``entry``, unless that was done since the engine has used the state last."""
        self.uses.wait()
        member = entry.member
        if member in self.open:
            return
        entry.shown, entry.is_removed = self._read(member), False
        entry.values_by_name = {name: shown.value for name, shown in entry.shown.items()}
        self.open[member] = entry

    def _read(self, member: Any) -> dict[str, _Shown]:
        (part, _), (pieces, source) = self.parts[member], self._state(member)
        shown = dict[str, _Shown]()
        for name, value in ({} if source is None else self._access.of(source)).items():
            if source is not None and name in self._access.elementwise(source):
                array, is_copy = self._array(part, pieces, name, value)
                shown[name] = _Shown(array, array._version if is_copy else None, array.dtype)
            elif pieces or name not in self._access.of_wholes:
                number = copy_of(value)
                version = number._version if isinstance(number, Tensor) else None
                shown[name] = _Shown(number, version, None)
        return shown

    def _array(
        self, part: MemberPart, pieces: Sequence[Piece], name: str, value: Any
    ) -> tuple[Tensor, bool]:
        """Return state ``name`` of ``part``, and whether it is a copy."""
        arrays, copies = [], False
        for segment, first, last in pieces:
            array = self._access.states[segment.tensor].get(name, value)
            if isinstance(array, CodedArray):
                arrays.append(array.values(first, last))
                copies = True
            elif segment.offloaded and (array.numel() == 1 or not array.stride(0)):
                storage = segment.parts[0].flat.reading()  # which has no memory of its own
                arrays.append(torch.empty(last - first, dtype=storage.dtype(name)))
                storage.fetch_into(name, segment.start + first, arrays[-1])
                copies = True
            else:
                arrays.append(array[first:last])
        if not pieces:
            coded = isinstance(value, CodedArray)
            arrays = [torch.zeros(0) if coded else value.new_zeros(0)]
        joined = concatenate(arrays)
        return joined.view(part.shape), copies or (
            len(arrays) > 1 and not shares_memory(joined, arrays[0])
        )

    def check(self, entry: MemberState, values: Mapping[str, object]) -> None:
        """Raise PartitionError for arrays among ``values``, assigned to ``entry``, of another shape
        or dtype, and UnsupportedOptimizerError for what no state can be.
        """
        self.uses.before_write()
        part, group = self.parts[entry.member]
        shape, initial = entry.member.shape, None
        for name, value in values.items():
            if name in self._access.of_wholes or value is None:
                continue
            known = entry.shown.get(name)
            dtype = None if known is None else known.dtype
            if known is None and isinstance(value, Tensor):
                if initial is None:
                    initial = InitialStates(self._access).of_group(
                        group, entry.member.new_zeros(1), decoded=True
                    )
                first = initial.get(name)
                dtype = first.dtype if isinstance(first, Tensor) and first.dim() else None
            if dtype is not None:
                if isinstance(value, Tensor) and (value.shape, value.dtype) == (shape, dtype):
                    continue
                raise PartitionError(
                    f"optimizer.state[...][{name!r}] of this rank's part of {part.name} was "
                    f"assigned {_described(value)} in place of a tensor of {dtype} and shape "
                    f"{tuple(shape)}; assign one of these"
                )
            if not (is_scalar(name, value, shape) or is_elementwise(name, value, shape)):
                where = f"this rank's part of {part.name}"
                refuse_unknown(self._access.optimizer, name, value, where)

    def take(self) -> None:
        """Store what a script has written to entries since the last call. Members whose numbers or
        names of states differ from then on are stepped apart, with those alone that have the same.
        """
        entries, self.open = self.open, {}
        changes = {member: self._change_of(entry) for member, entry in entries.items()}
        alike = defaultdict[Any, set[str]](set)  # names of parameters that are stepped together
        for member, change in changes.items():
            if change.apart:
                values = entries[member].values_by_name
                numbers = sorted(
                    (name, repr(value))
                    for name, value in values.items()
                    if not is_elementwise(name, value, member.shape)
                )
                alike[frozenset(values), *numbers].add(self.parts[member][0].name)
        for names in alike.values():
            self._table.separate(self._table.segments, frozenset(names))
        # in the order of the writes
        self._table.device.reallocate(
            dict.fromkeys(name for change in changes.values() for name in change.replaced)
        )
        for member, change in changes.items():
            if change.apart or change.values:
                self._write(member, entries[member].values_by_name, change)

    def _change_of(self, entry: MemberState) -> _Written:
        """Return what a script has written to ``entry`` since it was shown."""
        values, shown = entry.values_by_name, entry.shown
        changed = {
            name: value
            for name, value in values.items()
            if name not in shown
            or value is not shown[name].value
            or shown[name].version not in (None, getattr(value, "_version", None))
        }
        arrays = [n for n, value in changed.items() if self._is_array(n, value, entry.member.shape)]
        replaced = [n for n in arrays if n in shown and changed[n] is not shown[n].value]
        numbers = changed.keys() - arrays - set(self._access.of_wholes)
        return _Written(changed, replaced, bool(numbers) or values.keys() != shown.keys())

    def _is_array(self, name: str, value: object, shape: Sequence[int]) -> bool:
        """Return whether state ``name`` of a member of ``shape`` has one value per element."""
        return name not in self._access.of_wholes and is_elementwise(name, value, shape)

    def _write(self, member: Any, values: ParamState, change: _Written) -> None:
        """Store ``change``, by which the state of ``member`` has ``values``; if it is stepped
        apart, its segments have these alone.
        """
        changed, _, apart = change
        part, group = self.parts[member]
        pieces, states = self.pieces(part), self._access.states
        if not pieces and apart:
            stand_ins = [s for s in self._table.segments if s.group == group and not s.parts]
            pieces = [(segment, 0, 0) for segment in stand_ins]
        at = 0
        for segment, first, last in pieces:
            store = self._table.state_of(segment)
            if apart and not values:
                states.pop(segment.tensor, None)
                continue
            if not self._access.of(segment):
                store.create(segment)
            live = states[segment.tensor]
            for name in [*live] if apart else ():
                if name not in values:
                    del live[name]
            segment.begun = segment.begun or apart
            for name, value in changed.items():
                if self._is_array(name, value, member.shape):
                    if first < last:
                        store.put(segment, name, first, value.reshape(-1)[at : at + last - first])
                elif isinstance(live.get(name), Tensor) and is_scalar(name, value, (0,)):
                    live[name] = scalar_like(live[name], float(value))
                else:
                    live[name] = copy_of(value)
            at += last - first

    def discard(self) -> None:
        """Forget the entries, and what a script has written to them."""
        for entry in self._entries.values():
            entry.detach()
        self.open, self._entries, self._others = {}, {}, defaultdict(dict)


_NONE = object()


def _plain(items: Sequence[tuple[Any, ParamState]]) -> defaultdict[Any, ParamState]:
    return defaultdict(dict, items)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of {value.dtype} and shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
