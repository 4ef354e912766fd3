"""Access to the numbers that the parameters of a group share, such as step counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import state
from hf_zero.optim.device_state import StateEntries
from hf_zero.optim.segment_table import SegmentTable


class GroupNumbers:
    """The shared numbers of the groups of one optimizer."""

    def __init__(self, entries: StateEntries, table: SegmentTable) -> None:
        self._entries = entries
        self._table = table
        # number of loads of all state from outside; the most steps of a parameter in the last one
        self.loads, self.loaded_steps = 0, 0
        self.writes = 0  # number of writes to per-element state from outside

    def scalars(self) -> list[dict[str, float]]:
        """Return per group the numbers that its parameters share, such as ``{"step": 3.0}``. Equal
        on every rank; :meth:`apart` has the exceptions.
        """
        out: list[dict[str, float]] = [{} for _ in self._entries.groups]
        # from the first segment of the group that has any: the first step creates state on the
        # device
        for segment in self._table.segments:
            if not out[segment.group]:
                out[segment.group] = self._entries.numbers(segment)
        return out

    def apart(self) -> list[dict[str, dict[str, float]]]:
        """Return per group, if its parameters have made different numbers of steps, the numbers of
        each parameter with elements on this rank; otherwise an empty dict.
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
        """Record that state with these numbers, equal on all ranks, has replaced the former."""
        each = [*scalars, *(numbers for group in apart for numbers in group.values())]
        self.loads += 1
        self._table.rest(frozenset())  # the loaded state may lack theirs
        self.loaded_steps = int(max((numbers.get("step", 0) for numbers in each), default=0))

    def load(
        self,
        scalars: Sequence[Mapping[str, float]],
        apart: Sequence[Mapping[str, Mapping[str, float]]],
    ) -> None:
        """Load the results of :meth:`scalars` and of :meth:`apart`, which may name parameters of
        any rank; create state that does not exist yet.
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
