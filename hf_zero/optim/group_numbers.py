"""The numbers that the parameters of a group share, such as step counts, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import state
from hf_zero.optim.device_state import StateEntries
from hf_zero.optim.segment_table import SegmentTable


class GroupNumbers:
    """Those of the groups of one optimizer."""

    def __init__(self, entries: StateEntries, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        # of all state, from outside; the most steps of a parameter in the last
        self.loads, self.loaded_steps = 0, 0
        self.writes = 0  # to state of elements, from outside

    def scalars(self) -> list[dict[str, float]]:
        """Per group, the numbers its parameters share, such as ``{"step": 3.0}``; the same on
        every rank, but for :meth:`apart`.
        """
        out: list[dict[str, float]] = [{} for _ in self._entries.groups]
        # of the first in each group that has any: state on the device is made by the first step
        for segment in self._table.segments:
            if not out[segment.group]:
                out[segment.group] = self._entries.numbers(segment)
        return out

    def apart(self) -> list[dict[str, dict[str, float]]]:
        """Per group whose parameters have not all made the same steps: the numbers of each with
        elements on this rank; else nothing.
        """
        out: list[dict[str, dict[str, float]]] = [{} for _ in self._entries.groups]
        for segment in self._table.segments:
            if segment.group in self._table.parted and segment.parts:
                out[segment.group] |= dict.fromkeys(segment.names, self._entries.numbers(segment))
        return out

    def note_load(
        self,
        scalars: Sequence[Mapping[str, float]],
        apart: Sequence[Mapping[str, Mapping[str, float]]] = (),
    ) -> None:
        """State with these numbers, alike on all ranks, has taken the place of what there was."""
        each = [*scalars, *(numbers for group in apart for numbers in group.values())]
        self.loads += 1
        self._table.rest(frozenset())  # what rests has state, which what was loaded may lack
        self.loaded_steps = int(max((numbers.get("step", 0) for numbers in each), default=0))

    def load(
        self,
        scalars: Sequence[Mapping[str, float]],
        apart: Sequence[Mapping[str, Mapping[str, float]]],
    ) -> None:
        """Inverse of :meth:`scalars` and :meth:`apart`, whose parameters may be of any rank; state
        that does not exist yet is created.
        """
        self.note_load(scalars, apart)
        own = {name: values for group in apart for name, values in group.items()}
        if own:
            numbers_of = {name: tuple(sorted(values.items())) for name, values in own.items()}
            concerned = [
                segment
                for segment in self._table.segments
                if segment.parts and not segment.names.isdisjoint(own)
            ]
            self._table.parted |= {index for index, group in enumerate(apart) if group}
            self._table.divide(concerned, numbers_of.get)
        for segment in self._table.segments:
            values = (
                own.get(min(segment.names), scalars[segment.group])
                if own and segment.parts
                else scalars[segment.group]
            )
            if not values:
                if own and segment.parts and min(segment.names) in own:
                    self._table.state_of(segment).unstep(segment)
                continue
            self._table.state_of(segment).create(segment)
            kept = self._entries.of(segment)
            for name, number in values.items():
                if name not in kept:
                    raise UnsupportedOptimizerError(
                        f"optimizer {type(self._entries.optimizer).__name__} keeps no number "
                        f"{name!r} in group {segment.group}; the state was saved by "
                        "another optimizer. Use the same one, or load without optimizer states."
                    )
                if isinstance(kept[name], Tensor):
                    kept[name].fill_(number)
                else:
                    self._entries.optimizer.state[segment.tensor][name] = state.scalar_like(
                        kept[name], number
                    )
