"""The order in which units are reduced, and how many gathers go before each reduction.

[Note: no circle of waits]
A rank waits for a reduction (on a device: its stream does) when more than a few are under way, and
for a gather when it needs the unit. Whatever blocks ranks leave out, no circle of waits can come of
it while two things hold:

- A rank launches the next reduction as soon as nothing more can come for it there
  (``outstanding.py``), so that it has then waited for no gather but those that lead to this unit.
- Before a rank waits for a reduction it has issued all gathers that any rank may wait for before it
  launches the last reduction launched here. How many those are is measured in the first backward of
  a kind (:meth:`ReductionOrder.learn`).

So gathers and reductions have one common order, in which whatever waits comes after what it waits
for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hf_zero.units.unit import Unit

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


class Gathers(Protocol):
    """What reductions must know of the gathers of the pass under way."""

    @property
    def recording(self) -> bool: ...

    @property
    def gathers(self) -> bool: ...

    @property
    def recorded(self) -> int: ...

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
