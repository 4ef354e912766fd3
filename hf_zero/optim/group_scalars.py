"""The scalar states (step counts) of parameters, by group: read, reported for a save, joined over
ranks, and loaded.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from torch import Tensor

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim.members import ShownState
from hf_zero.optim.segment_entries import scalar_like
from hf_zero.optim.segment_table import SegmentTable
from hf_zero.optim.segments import Segment

ParameterScalars = dict[str, float] | None
"""The scalar states of one parameter; None: it has made no step."""
GroupReport = tuple[dict[str, float], dict[str, dict[str, float]]]
"""The scalars of parameters: those of the ones with the most steps, and those of others by name; {}
for one that has made no step.
"""


def report_of(scalars: Mapping[str, ParameterScalars]) -> GroupReport:
    """Return the report of the parameters of a group; :func:`scalars_in` reads it."""
    stepped = [numbers for numbers in scalars.values() if numbers is not None]
    most = max(stepped, key=lambda numbers: numbers.get("step", 0.0), default={})
    return most, {name: of or {} for name, of in scalars.items() if of is None or of != most}


def scalars_in(report: GroupReport, name: str) -> ParameterScalars:
    """Return the scalars of parameter ``name`` in ``report``, which must be about it."""
    most, others = report
    return (others[name] or None) if name in others else most


class GroupScalars:
    """The scalar states of the parameters in the groups of one optimizer."""

    def __init__(self, table: SegmentTable, shown: ShownState) -> None:
        self._table, self._entries, self._shown = table, table.entries, shown
        self.loads = 0  # number of loads of all state from outside
        self.loaded_steps = 0  # the most steps of a parameter in the last one

    def of_groups(self) -> list[dict[str, float]]:
        """Return per group the scalars of its first parameters, such as ``{"step": 3.0}``; without
        parameters on this rank, those of its stand-in.
        """
        out: list[dict[str, float]] = [{} for _ in self._entries.groups]
        # from the first segment of the group that has any: the first step creates state on the
        # device
        for segment in self._shown.segments:
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
        for segment in self._shown.segments:
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
        ranks with their elements have them; None for one never stepped. An empty tensor, which has
        elements on no rank, has those of the parameters of its group with the most steps.

        ``names``: this rank's names -> names in the whole model. ``gather`` returns its argument of
        every rank (collective).
        """
        saved_here = [flat for flat in self._table.flats if flat.spec.saves_shard]  # no replicas
        reported = {slot.name for flat in saved_here for slot in flat.layout.slots}
        here = self.of_parameters().items()
        of_ranks = gather({names[name]: numbers for name, numbers in here if name in reported})
        of_model = dict[str, ParameterScalars](ChainMap(*map(dict, of_ranks)))
        found = {name: of_model[whole] for name, whole in names.items() if whole in of_model}
        most = [report_of(of)[0] for of in self._by_group(found)]
        return {name: found.get(name, most[group]) for name, group in self._table.group_of.items()}

    def reports(self, whole: Callable[[str], str]) -> list[GroupReport]:
        """Return the report on the parameters of each group that have elements on this rank;
        ``whole`` returns names in the whole model.
        """
        of_groups = self._by_group(self.of_parameters())
        return [report_of({whole(name): n for name, n in of.items()}) for of in of_groups]

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
        of_stand_ins: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Load the scalars of parameters, which may be of any rank; one that is missing there
        begins without state. Create state that does not exist yet, and join the segments of what
        counts alike. ``of_stand_ins``, by group: by default those of the parameters with the most
        steps. Raises UnsupportedOptimizerError for a scalar that a group does not keep.
        """
        table = self._table
        of_stand_ins = of_stand_ins or [report_of(of)[0] for of in self._by_group(scalars)]
        self.note_load([*of_stand_ins, *filter(None, scalars.values())])
        table.join(self._kinds_with(scalars))
        for segment in table.segments:
            numbers: ParameterScalars = dict(of_stand_ins[segment.group]) or None
            if segment.parts:  # its parameters are of one kind, and have equal numbers
                numbers = scalars.get(min(segment.names))
            if numbers is None:
                table.state_of(segment).reset(segment)
            elif numbers:
                self._write(segment, numbers)

    def _kinds_with(self, scalars: Mapping[str, ParameterScalars]) -> dict[str, Hashable]:
        """Return what the parameters of a segment must have in common after a load of ``scalars``:
        the names of their states, their numbers, and whether they have begun.
        """
        kinds = dict[str, Hashable]()
        for segment in self._shown.segments:
            states = frozenset(self._entries.of(segment))
            for name in segment.names:
                if (numbers := scalars.get(name)) is None:
                    kinds[name] = states, None, False
                else:
                    begins = segment.begun or bool(numbers and numbers.get("step", 1))
                    kinds[name] = states, tuple(sorted(numbers.items())), begins
        return kinds

    def _write(self, segment: Segment, numbers: Mapping[str, float]) -> None:
        """Write ``numbers`` into the entries of ``segment``, which are created if it has none."""
        self._table.state_of(segment).create(segment)
        segment.begun = segment.begun or bool(numbers.get("step", 1))
        live = self._entries.states[segment.tensor]
        for name, number in numbers.items():
            if live.get(name) is None:
                raise UnsupportedOptimizerError(
                    f"optimizer {type(self._entries.optimizer).__name__} keeps no number "
                    f"{name!r} in group {segment.group}; the state was saved by "
                    "another optimizer. Use the same one, or load without optimizer states."
                )
            if isinstance(live[name], Tensor):
                live[name].fill_(number)
            else:
                live[name] = scalar_like(live[name], number)
