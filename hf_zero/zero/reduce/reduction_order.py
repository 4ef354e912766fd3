"""The order of reductions, and the number of gathers before each of them.

[Note: no deadlock]
A rank waits for a reduction (on a device: its stream does) when more than a few are in flight, and
for a gather when it needs the unit. Whichever blocks ranks leave out, this cannot deadlock while
two conditions hold:

- A rank launches the next reduction as soon as its unit can get no more gradients there
  (:class:`RemainingForwards`), so it has then waited only for gathers that lead to this unit.
- Before a rank waits for a reduction it has issued all gathers that any rank may wait for before it
  launches the last reduction launched here. Their number is measured in the first backward of a
  kind (:meth:`ReductionOrder.learn`). A rank that needs a later one first, since its rows take
  another way through the model, fetches that unit from the others' threads.

So gathers and reductions have one common order, in which each wait follows the operation that it
waits for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hf_zero.zero.gather.merged_orders import merged
from hf_zero.zero.gather.schedule import PassDepths
from hf_zero.zero.gather.unit import Unit


@dataclass
class BackwardObservations:
    """Observations from one backward on one rank, which the reducer writes down as they come and
    sends to the others at its end; units by index.
    """

    # the backward of an older forward was pending, so units were not complete before the end
    older_pending: bool
    has_gradients: bool = False  # on parameters, unlike torch.autograd.grad
    complete: list[int] = field(default_factory=list)  # units in the order of completion
    # by complete unit: number of gathers that the pass had issued then
    issued: dict[int, int] = field(default_factory=dict)
    # units that got gradients after their reduction was launched
    late: list[int] = field(default_factory=list)
    # units that got gradients after they seemed complete, but before their launch
    parts: list[int] = field(default_factory=list)
    # units that could have got gradients until the end
    unfinished: list[int] = field(default_factory=list)


class ReductionOrder:
    """One order for all ranks: the reversed order of definition with the root after the others, and
    last the units outside the model, until the first backward has shown a better one.
    """

    def __init__(self, units: Sequence[Unit]):
        # The unit of the model itself is the first: its modules run before and after the others'.
        root, *others = (unit for unit in units if unit.modules)
        outside = [unit for unit in units if not unit.modules]
        self.units = [u for u in (*reversed(others), root, *outside) if u.trainable_flats]
        # Those whose end no hook reports; in time, those that :meth:`learn` finds with gradients in
        # several parts.
        self.reduced_last: set[Unit] = set(outside)
        self._has_learned = False
        # by kind of backward and unit: the number of gathers of the plan that a rank may issue, and
        # wait for, before it launches the reduction of the unit
        self.depths: dict[Hashable, dict[int, int]] = {}

    def learn(
        self, key: Hashable, observed: Sequence[BackwardObservations], depths: PassDepths
    ) -> None:
        """Update the order from the observations of each rank in the first backward of a kind, and
        its ``depths``. Equal on all ranks.
        """
        by_index = {unit.index: unit for unit in self.units}
        late = {by_index[index] for record in observed for index in (*record.late, *record.parts)}
        if not self._has_learned:
            self._has_learned = True
            defined = [unit.index for unit in self.units]
            indices = merged([*(record.complete for record in observed), defined], defined.index)
            unfinished = {index for record in observed for index in record.unfinished}
            indices.sort(key=unfinished.__contains__)  # these last
            self.units = [by_index[index] for index in indices]
        self.reduced_last |= late
        self.units.sort(key=self.reduced_last.__contains__)
        of_units = self.depths[key] = dict(depths.of_units)
        for record in observed:
            for index, issued in record.issued.items():
                of_units[index] = max(of_units.get(index, 0), depths.after[issued])
            of_units.update(dict.fromkeys(record.unfinished, depths.whole))
