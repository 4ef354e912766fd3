"""The order of reductions, the number of gathers before each of them, and the units that may still
get gradients on this rank in the backward under way.

[Note: no deadlock]
A rank waits for a reduction (on a device: its stream does) when more than a few are in flight, and
for a gather when it needs the unit. Whichever blocks ranks leave out, this cannot deadlock while
two conditions hold:

- A rank launches the next reduction as soon as its unit can get no more gradients there
  (:class:`RemainingForwards`), so it has then waited only for gathers that lead to this unit.
- Before a rank waits for a reduction it has issued all gathers that any rank may wait for before it
  launches the last reduction launched here. Their number is measured in the first backward of a
  kind (:meth:`ReductionOrder.learn`).

So gathers and reductions have one common order, in which each wait follows the operation that it
waits for.

[Note: what is over]
Autograd runs ready nodes in reverse order of creation, so a node runs after all nodes of its
backward that were created later. Each rank numbers entry and exit of unit forwards. Once a backward
reaches the output of a forward left at t, every forward of that graph entered after t is done;
forwards of another graph are not part of this backward. Forwards entered before t, of whatever
graph, may still follow.

Reentrant checkpointing runs a forward without a graph and reruns it inside the backward: such
forwards are counted (``UnitCalls.expected_reruns``) if checkpoints of that kind have been seen,
and in the first backward of each kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_zero.zero.gather.schedule import merged
from hf_zero.zero.gather.unit import OutermostForward, Unit, UnitCall


@dataclass
class BackwardObservations:
    """Observations from one backward on one rank; units by index."""

    # the backward of an older forward was pending, so units were not complete before the end
    older_pending: bool
    has_gradients: bool = False  # on parameters, unlike torch.autograd.grad
    complete: list[int] = field(default_factory=list)  # units in the order of completion
    # number of gathers issued before it, by unit
    depths: dict[int, int] = field(default_factory=dict)
    # units that got gradients after their reduction was launched
    late: list[int] = field(default_factory=list)
    # units that got gradients after they seemed complete, but before their launch
    parts: list[int] = field(default_factory=list)
    # units that could have got gradients until the end
    unfinished: list[int] = field(default_factory=list)


class ReductionOrder:
    """One order for all ranks: the reversed order of definition, until the first backward has shown
    a better one.
    """

    def __init__(self, units: Sequence[Unit]):
        root, *others = (unit for unit in units if unit.modules)
        outside = [unit for unit in units if not unit.modules]
        self.units = [u for u in (*reversed(others), root, *outside) if u.trainable_flats]
        # units with gradients in several parts, and those whose end no hook reports
        self.reduced_last: set[Unit] = set(outside)
        self._known = False
        # by kind of backward and unit: the number of gathers of the plan that a rank may wait for
        # before it launches the reduction of the unit
        self.depths: dict[Hashable, dict[int, int]] = {}
        self.left_some_out = False  # some backward of the window has left units out

    def without(self, left_out: frozenset[Unit], reduces: bool) -> list[Unit]:
        """Return the order without units that no rank uses in a backward. If it ``reduces``, units
        with unreduced gradients of earlier backwards stay in.
        """
        if not left_out:
            return list(self.units)
        self.left_some_out = True
        return [
            unit
            for unit in self.units
            if unit not in left_out
            or (reduces and any(flat.gradient.has_unreduced for flat in unit.trainable_flats))
        ]

    def learn(
        self,
        key: Hashable,
        observed: Sequence[BackwardObservations],
        plan_positions: Sequence[int],
        plan: Sequence[int],
    ) -> None:
        """Update the order from the observations of each rank in the first backward of a kind.
        Equal on all ranks.

        plan_positions: position in the plan after 0, 1, ... of the issued gathers. plan: unit
        indices of the gathers of the plan.
        """
        by_index = {unit.index: unit for unit in self.units}
        late = {by_index[index] for record in observed for index in (*record.late, *record.parts)}
        if not self._known:
            self._known = True
            indices = merged(
                [*(record.complete for record in observed), [unit.index for unit in self.units]]
            )
            unfinished = {index for record in observed for index in record.unfinished}
            self.units = [
                by_index[index] for index in sorted(indices, key=lambda index: index in unfinished)
            ]
        self.reduced_last |= late
        self.units.sort(key=lambda unit: unit in self.reduced_last)
        depths: dict[int, int] = {index: position + 1 for position, index in enumerate(plan)}
        for record in observed:
            _raise_to(
                depths, {index: plan_positions[count] for index, count in record.depths.items()}
            )
            _raise_to(depths, dict.fromkeys(record.unfinished, len(plan)))
        self.depths[key] = depths


def _raise_to(depths: dict[int, int], others: Mapping[int, int]) -> None:
    for index, depth in others.items():
        depths[index] = max(depths.get(index, 0), depth)


NOT_BEGUN = 1 << 62


class RemainingForwards:
    """The forwards that the backward under way may still reach."""

    def __init__(self) -> None:
        self._tick = NOT_BEGUN  # calls entered at this tick or later have ended their backward
        # calls in backward without marks, whose end no hook reports
        self.unmarked: list[UnitCall] = []
        # stand-in for forwards recomputed in this backward
        self.recomputation: OutermostForward | None = None
        self.reruns_seen = False  # a checkpoint has run a backward inside a backward

    def begin(self, recomputation: OutermostForward) -> None:
        """Begin a backward."""
        self._tick, self.recomputation = NOT_BEGUN, recomputation
        self.unmarked.clear()

    def end(self) -> None:
        self._tick, self.recomputation = NOT_BEGUN, None
        self.unmarked.clear()

    def advance_to(self, tick: int) -> Sequence[Unit]:
        """Advance the backward to ``tick``; return units of unmarked calls that end by then."""
        if tick >= self._tick:
            return ()
        self._tick = tick
        units = list[Unit]()
        over, unmarked = list[UnitCall](), list[UnitCall]()
        for call in self.unmarked:
            (over if call.began >= tick else unmarked).append(call)
        self.unmarked = unmarked
        for call in over:
            if not self.awaits_calls(call.unit):
                units.append(call.unit)
        return units

    def awaits_calls(self, unit: Unit) -> bool:
        """Return whether the backward of a call of ``unit`` is pending or running."""
        # Several blocks may share a unit, and each of their calls asks: the call found last time
        # answers most of them.
        calls, reached, recomputation = unit.calls, self._tick, self.recomputation
        awaited = calls.awaited()
        if (
            awaited is not None
            and (awaited.began < reached or awaited.root is recomputation)
            and (awaited in calls.in_backward or awaited in calls.pending)
        ):
            return True
        last: UnitCall | None = None  # a backward reaches it last
        for candidates in (calls.in_backward, calls.pending):
            for call in candidates:
                may_come = call.began < reached or call.root is recomputation
                if may_come and (last is None or call.began < last.began):
                    last = call
        if last is None:
            return False
        calls.awaited = weakref.ref(last)
        return True

    def awaits_reruns(self, unit: Unit, learning: bool) -> bool:
        """Return whether a checkpoint may still rerun ``unit``.

        ``learning``: this backward is the first of its kind.
        """
        return unit.calls.expected_reruns > 0 and (learning or self.reruns_seen)

    def awaits(self, unit: Unit, learning: bool) -> bool:
        """Return whether ``unit`` may still get gradients."""
        return (
            bool(unit.calls.in_forward or unit.calls.read_by)
            or self.awaits_reruns(unit, learning)
            or self.awaits_calls(unit)
        )
