"""Which units the backward under way may still bring gradients for, on this rank.

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
from collections.abc import Sequence
from operator import attrgetter

from hf_zero.units.unit import RootForward, Unit, UnitForward

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
        found = unit.awaited()
        if (
            found is not None
            and self._may_come(found)
            and (found in unit.in_backward or found in unit.pending)
        ):
            return True
        coming = [
            call
            for calls in (unit.in_backward, unit.pending)
            for call in calls
            if self._may_come(call)
        ]
        if not coming:
            return False
        unit.awaited = weakref.ref(min(coming, key=_began))  # a backward comes to it last
        return True

    def _may_come(self, call: UnitForward) -> bool:
        return call.began < self._reached or call.outer is self.recomputation

    def awaits_reruns(self, unit: Unit, learning: bool) -> bool:
        """Whether a checkpoint may still run ``unit`` again.

        ``learning``: the first backward of its kind is under way.
        """
        return unit.reruns > 0 and (learning or self.reruns_seen)

    def awaits(self, unit: Unit, learning: bool) -> bool:
        """Whether gradients of ``unit`` may still come."""
        return (
            bool(unit.in_forward or unit.pinned_by)
            or self.awaits_reruns(unit, learning)
            or self.awaits_calls(unit)
        )
