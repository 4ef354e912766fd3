"""The order of reductions, and the number of gathers before each of them.

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
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_zero.zero.gather.schedule import merged
from hf_zero.zero.gather.unit import Unit


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
