"""State dicts of an optimizer under an engine: written, and prepared for a load, which
``hf_zero/zero/step/saved_segments.py`` makes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.logging import listed
from hf_zero.offload.storage import COMPENSATION, MASTER
from hf_zero.optim.adoption import adopt_states
from hf_zero.optim.group_settings import GroupSettings, plain_settings
from hf_zero.optim.initial_state import initial_state, moment_names
from hf_zero.optim.optimizer_state import OptimizerState
from hf_zero.optim.segment_entries import copy_of
from hf_zero.optim.segments import ParamGroup, ParamState
from hf_zero.optim.snapshots import KEY, described


class StateDicts:
    """State dicts of the optimizer that has ``state``, and ``settings`` of its groups."""

    def __init__(self, state: OptimizerState, settings: GroupSettings) -> None:
        self._state, self._settings, self._entries = state, settings, state.table.entries
        self._optimizer, self._parts = state.table.entries.optimizer, state.members.parts

    def packed(self, pack: Callable[[], StateDict]) -> StateDict:
        """Return what ``pack``, the optimizer's own ``state_dict``, returns over this rank's parts
        of the parameters of its groups; whole ones have the shape of their parameter. Those that
        were never stepped have no entry, as in torch. Offloaded state is read into memory.
        """
        state, table, optimizer = self._state, self._state.table, self._optimizer
        state.members.shown.take()
        arrays = {
            flat.key: table.offloaded.copies(flat) if flat.offloaded else state.tensors(flat)
            for flat in state.table.flats
        }
        states: defaultdict[Tensor, ParamState] = defaultdict(dict)
        for part, member in zip(chain(*self._parts), chain(*state.members.lists)):
            if part.flat is None or part.first == part.last:
                continue
            segment, _ = table.parts(part.flat, part.start, part.stop)[0]
            entry, own = self._entries.of(segment).items(), arrays[part.flat.key]
            if entry and (segment.begun or not segment.offloaded):
                states[member] = {
                    name: part.of(own[name]) if name in own else copy_of(value)
                    for name, value in entry
                }
        groups = optimizer.param_groups
        kept, between = optimizer.state, [group["params"] for group in groups]
        try:
            optimizer.state = states
            for group, params in zip(groups, state.members.lists):
                group["params"] = params
            packed = pack()
        finally:
            optimizer.state = kept
            for group, params in zip(optimizer.param_groups, between):
                group["params"] = params
        return described(packed, self._parts, state.scalars.of_groups(), state.table.flats)

    def with_parts(self, packed: StateDict) -> StateDict:
        """Return ``packed``, a state dict of this model, with the part of each entry: whole
        parameters, or the parts of this rank, if it has none. Raises UnsupportedOptimizerError for
        other groups.
        """
        self._settings.refuse_other_groups(packed["param_groups"], "a state dict")
        if KEY in packed:
            return packed
        saved = [len(group["params"]) for group in packed["param_groups"]]
        live = [*map(len, self._parts)]
        if saved != live:
            raise UnsupportedOptimizerError(
                f"a state dict of {saved} parameters a group cannot go into optimizer "
                f"{type(self._optimizer).__name__}, which has {live}; load one of the same groups, "
                "or use load_checkpoint"
            )
        given = iter(range(sum(live)))
        states = {entry: dict(of) for entry, of in packed["state"].items()}
        adopt_states(self._optimizer, states.values())
        read = [
            [part.read_as(states.get(entry, {})) for part, entry in zip(of, given)]
            for of in self._parts
        ]
        return described(packed | {"state": states}, read, None, self._state.table.flats)

    def refuse_unkept(
        self,
        kinds: Collection[str],
        numbers: Sequence[Collection[str]],
        settings: Sequence[ParamGroup],
    ) -> None:
        """Raise UnsupportedOptimizerError if, with the ``settings`` of its groups in a state dict,
        no group keeps a state of one of the ``kinds``, or a group not one of its ``numbers``.
        """
        segments = self._state.members.shown.segments
        present = {MASTER, COMPENSATION}.union(*(self._entries.of(s).keys() for s in segments))
        if present.issuperset(chain(kinds, *numbers)):
            return
        kept = list[set[str]]()
        for group, saved in zip(self._optimizer.param_groups, settings):
            new = {**group, **plain_settings(saved)}
            first = initial_state(self._optimizer, new, torch.zeros(1))
            kept.append(present | first.keys() | moment_names(self._optimizer, new))
        unknown = set(kinds).difference(*kept)
        unknown = unknown.union(*(set(own) - names for own, names in zip(numbers, kept)))
        if unknown:
            keeps = sorted(set().union(*kept) - {MASTER, COMPENSATION})
            raise UnsupportedOptimizerError(
                f"a state dict has state {listed(sorted(unknown), 6)}, and optimizer "
                f"{type(self._optimizer).__name__} keeps {', '.join(keeps)}: remove it from the "
                "dict, or load into the optimizer that saved it; nothing was loaded"
            )

    def settings_of(self, packed: StateDict) -> StateDict:
        """Return ``packed`` without its entries, for the optimizer's own ``load_state_dict``."""
        groups = [
            {**group, "params": [*range(len(live["params"]))]}
            for group, live in zip(packed["param_groups"], self._optimizer.param_groups)
        ]
        return {**packed, "state": {}, "param_groups": groups}
