"""When a unit is reduced: the order of reductions, how many gathers go before each of them, and for
which units the backward under way may still bring gradients on this rank.

[Note: no circle of waits]
A rank waits for a reduction (on a device: its stream does) when more than a few are under way, and
for a gather when it needs the unit. Whatever blocks ranks leave out, no circle of waits can come of
it while two things hold:

- A rank launches the next reduction as soon as nothing more can come for it there
  (:class:`Outstanding`), so that it has then waited for no gather but those that lead to this unit.
- Before a rank waits for a reduction it has issued all gathers that any rank may wait for before it
  launches the last reduction launched here. How many those are is measured in the first backward of
  a kind (:meth:`ReductionOrder.learn`).

So gathers and reductions have one common order, in which whatever waits comes after what it waits
for.

[Note: what is over]
Autograd runs ready nodes in reverse order of creation, so a node runs after all nodes of its
backward that were made later. Ranks therefore number the moments at which they enter and leave
forwards of units. Once a backward has reached the output of a forward, all forwards that were
entered after that one was left are over; where they belong to another graph, they are not in this
backward. Forwards that were entered before, of whatever graph, may still come.

Reentrant checkpointing runs a forward without a graph and runs it again inside the backward: such
forwards are counted (``Unit.reruns``) where checkpoints of that kind have been seen, and in the
first backward of each kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, TypeVar

from hf_zero.zero.layout.unit import RootForward, Unit, UnitForward

T = TypeVar("T")


def merged(orders: Sequence[Sequence[T]]) -> list[T]:
    """The first of ``orders``; what only a later one holds comes right after what precedes it
    there.
    """
    result = list(orders[0])
    held = set(result)
    for order in orders[1:]:
        place = 0  # after what precedes, or at the start
        for each in order:
            if each in held:
                place = len(result) - result[::-1].index(each)
            else:
                result.insert(place, each)
                held.add(each)
                place += 1
    return result


def places(record: Sequence[T], plan: Sequence[T]) -> list[int]:
    """After how many gathers of ``plan`` the first 0, 1, 2... of ``record``, which is part of it
    in this order, are issued.
    """
    found = [0]
    for each in record:
        found.append(plan.index(each, found[-1]) + 1)
    return found


class Gathers(Protocol):
    """What reductions must know of the gathers of the pass under way."""

    @property
    def recording(self) -> bool: ...

    @property
    def gathers(self) -> bool: ...

    @property
    def issued(self) -> int: ...

    @property
    def places(self) -> Sequence[int]: ...

    @property
    def plan(self) -> Sequence[Unit]: ...

    def issue_through(self, count: int) -> None: ...


@dataclass
class Shown:
    """What a backward has shown on one rank; units by index."""

    # an older forward still waits for its backward, so that units were not complete before the end
    waits: bool
    brought: bool = False  # gradients to parameters, which torch.autograd.grad does not
    complete: list[int] = field(default_factory=list)  # in the order in which units became complete
    depths: dict[int, int] = field(default_factory=dict)  # gathers issued until then, by unit
    # units of which gradients came after their reduction was launched
    late: list[int] = field(default_factory=list)
    # others of which gradients came after they seemed complete
    parts: list[int] = field(default_factory=list)
    # units that could have got gradients until the end
    unfinished: list[int] = field(default_factory=list)


class ReductionOrder:
    """One order for all ranks.

    It is that of the definition, backwards, until the first backward has shown a better one.
    """

    def __init__(self, units: Sequence[Unit]):
        self.units = [unit for unit in [*reversed(units[1:]), units[0]] if unit.trainable]
        self.deferred: set[Unit] = set()  # units whose gradients come in parts: reduced last
        self._known = False
        self._depths: dict[Hashable, dict[int, int]] = {}
        self.left_some_out = False  # in a backward of the window

    def without(self, left_out: frozenset[Unit], reduces: bool) -> list[Unit]:
        """The order without units that no rank uses in a backward; where that ``reduces``, what
        earlier ones have left unreduced goes with it.
        """
        if not left_out:
            return list(self.units)
        self.left_some_out = True
        return [
            unit
            for unit in self.units
            if unit not in left_out
            or (reduces and any(flat.gradient.has_unreduced for flat in unit.trainable))
        ]

    def depth(self, key: Hashable, unit: Unit) -> int:
        """How many gathers of the plan of ``key`` a rank may wait for before it launches the
        reduction of ``unit``.
        """
        return self._depths.get(key, {}).get(unit.index, 0)

    def learn(
        self, key: Hashable, shown: Sequence[Shown], places: Sequence[int], plan: Sequence[int]
    ) -> None:
        """Take over what the first backward of a kind has shown on each rank. Alike on all ranks.

        places: where in the plan each of the gathers that were issued stands, after 0 of them, 1,
        and so on. plan: the gathers of the plan, by unit.
        """
        by_index = {unit.index: unit for unit in self.units}
        late = {by_index[index] for each in shown for index in (*each.late, *each.parts)}
        if not self._known:
            self._known = True
            indices = merged(
                [*(each.complete for each in shown), [unit.index for unit in self.units]]
            )
            unfinished = {index for each in shown for index in each.unfinished}
            self.units = [
                by_index[index] for index in sorted(indices, key=lambda index: index in unfinished)
            ]
        self.deferred |= late
        self.units.sort(key=lambda unit: unit in self.deferred)
        depths: dict[int, int] = {index: place + 1 for place, index in enumerate(plan)}
        for each in shown:
            _raise_to(depths, {index: places[count] for index, count in each.depths.items()})
            _raise_to(depths, dict.fromkeys(each.unfinished, len(plan)))
        self._depths[key] = depths


def _raise_to(depths: dict[int, int], others: Mapping[int, int]) -> None:
    for index, depth in others.items():
        depths[index] = max(depths.get(index, 0), depth)


END = 1 << 62
_began = attrgetter("began")


class Outstanding:
    """The forwards whose backward may still come in the backward under way."""

    def __init__(self) -> None:
        self._moments = 0
        self._reached = END  # calls entered at this moment or later are over
        self._unmarked: list[UnitForward] = []  # calls under way whose end no mark tells
        self.recomputation: RootForward | None = (
            None  # what runs forwards in the backward under way
        )
        self.reruns_seen = False  # a checkpoint has run a backward inside a backward

    def moment(self) -> int:
        self._moments += 1
        return self._moments

    def begin(self, recomputation: RootForward) -> None:
        """A backward starts."""
        self._reached, self.recomputation = END, recomputation
        self._unmarked.clear()

    def end(self) -> None:
        self._reached, self.recomputation = END, None
        self._unmarked.clear()

    def starts(self, call: UnitForward) -> None:
        """The backward of ``call`` starts."""
        if not call.marked:
            self._unmarked.append(call)

    def reach(self, moment: int) -> Sequence[Unit]:
        """The backward has come to ``moment``; gives the units of calls without a mark that are
        over by that.
        """
        if moment >= self._reached:
            return ()
        self._reached = moment
        over = [call for call in self._unmarked if call.began >= moment]
        if over:
            self._unmarked = [call for call in self._unmarked if call.began < moment]
        return [call.unit for call in over if not self.awaits_calls(call.unit)]

    def awaits_calls(self, unit: Unit) -> bool:
        """Whether the backward of a call of ``unit`` may still come or is under way."""
        # Several blocks may share a unit, and each of their calls asks: the one that was found last
        # time answers most of them.
        found = unit.forwards.awaited()
        if (
            found is not None
            and self._may_come(found)
            and (found in unit.forwards.in_backward or found in unit.forwards.pending)
        ):
            return True
        coming = [
            call
            for calls in (unit.forwards.in_backward, unit.forwards.pending)
            for call in calls
            if self._may_come(call)
        ]
        if not coming:
            return False
        unit.forwards.awaited = weakref.ref(min(coming, key=_began))  # a backward comes to it last
        return True

    def _may_come(self, call: UnitForward) -> bool:
        return call.began < self._reached or call.outer is self.recomputation

    def awaits_reruns(self, unit: Unit, learning: bool) -> bool:
        """Whether a checkpoint may still run ``unit`` again.

        ``learning``: the first backward of its kind is under way.
        """
        return unit.forwards.reruns > 0 and (learning or self.reruns_seen)

    def awaits(self, unit: Unit, learning: bool) -> bool:
        """Whether gradients of ``unit`` may still come."""
        return (
            bool(unit.forwards.in_forward or unit.forwards.pinned_by)
            or self.awaits_reruns(unit, learning)
            or self.awaits_calls(unit)
        )
