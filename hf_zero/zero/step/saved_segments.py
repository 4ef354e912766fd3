"""The state dict of the user's optimizer under an engine, as a source of state.

Its entries belong to parts of parameters (``hf_zero/optim/snapshots.py``), up to release 0.2 to
segments of flat buffers. With other units, or other parameters that stay whole, a rank owns other
elements: ranks then exchange them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.logging import listed, log_rank0
from hf_zero.optim.group_scalars import ParameterScalars
from hf_zero.optim.segment_entries import is_elementwise, is_scalar
from hf_zero.optim.snapshots import KEY, layout_of
from hf_zero.optim.whole_tensor import ShardRanks, tensor_state_names
from hf_zero.optim.whole_tensor_state import TensorsByParameter
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.whole_names import WholeNames
from hf_zero.zero.state_entries import StateEntry, StateSource, names_by_kind

if TYPE_CHECKING:
    from hf_zero.optim.snapshots import Layout
    from hf_zero.zero.sharded_engine import ShardedEngine


class _Run(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, at ``offset`` of entry ``entry``."""

    start: int
    stop: int
    entry: int
    offset: int


@dataclass(eq=False)
class _Saved:
    """The content of one rank's state dict, by parameter of the whole model."""

    runs: dict[str, list[_Run]] = field(default_factory=dict)
    kinds: dict[str, set[str]] = field(default_factory=dict)
    group_of: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, dict[str, float] | None] = field(default_factory=dict)
    tensor_state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    shared: list[Counter[tuple[tuple[str, float], ...]]] = field(default_factory=list)  # by group
    refusal: str = ""


class SavedSegments(StateSource):
    """The state in ``packed``, a state dict of the optimizer of ``engine``. Collective, as is a
    transfer of it, if it was saved over other flat buffers.

    Raises UnsupportedOptimizerError, on all ranks, for elements that it lacks, for parameters in
    other groups, and for state of whole tensors that no optimizer here keeps.
    """

    def __init__(self, packed: Mapping[str, Any], engine: ShardedEngine):
        bound, flats = engine.bound, engine.sharded_model.trainable
        self._kind = type(engine.optimizer).__name__
        self._of_wholes, self._keeps = tensor_state_names(engine.optimizer), bound.state.keeps
        self._shapes = {slot.name: tuple(slot.shape) for f in flats for slot in f.layout.slots}
        self._state = dict[Any, Any](packed["state"])
        self._drop_frozen(packed[KEY])
        self._own = WholeNames(engine.module).own_of(bound.group_of)
        self._group_of = bound.group_of
        layout = layout_of(flat.optimizer_shard for flat in flats)
        former = packed[KEY].get("layout", layout)
        self._ranks = ShardRanks() if former == layout else bound.ranks
        trained = {self._own.get(name, name) for slots in former.values() for name, *_ in slots}
        # what trains only since the save has no state there; a dict of another model has others
        own = {*self._own.values()}
        self._new = own - trained if trained <= own else set[str]()
        ranges = {
            self._own[slot.name]: StateEntry(flat, slot.name, "").range
            for flat in flats
            for slot in flat.layout.slots
            if slot.name in self._own and self._own[slot.name] not in self._new
        }
        every = self._ranks.gather_objects((self._read(packed, former), ranges))
        self._saved: list[_Saved] = [saved for saved, _ in every]
        self._wanted: list[dict[str, tuple[int, int]]] = [ranges for _, ranges in every]
        for saved in self._saved:
            if saved.refusal:
                raise UnsupportedOptimizerError(saved.refusal)
        kinds, numbers = set[str](), [set[str]() for _ in bound.groups]
        for saved in self._saved:
            kinds.update(*saved.kinds.values())
            for name, of_name in saved.scalars.items():
                numbers[saved.group_of[name]].update(of_name or ())
        bound.state_dicts.refuse_unkept(kinds, numbers, packed["param_groups"])
        groups = {self._own[name]: group for name, group in bound.group_of.items()}
        for target, ranges in enumerate(self._wanted):
            for name in ranges:
                for source, _ in self._runs(name, target):
                    former_group, group = self._saved[source].group_of[name], groups.get(name)
                    if group not in (None, former_group):
                        raise UnsupportedOptimizerError(
                            f"a state dict of optimizer {self._kind} has {name!r} in group "
                            f"{former_group}, here it is in group {group}; build the optimizer "
                            "with the groups it was saved with"
                        )

    def _drop_frozen(self, description: Mapping[str, Any]) -> None:
        """Drop the state of parameters that are frozen here; log which have made a step."""
        dropped = [
            name
            for entry, (name, *_) in enumerate(description.get("parts", ()))
            if name not in self._shapes and (state := self._state.pop(entry, None))
            if state.get("step", 1)  # Adagrad creates state before the first step
        ]
        if dropped:
            text = (
                f"a state dict of optimizer {self._kind} has state of {listed(dropped, 3)}, frozen "
                "here: it is dropped, and begins anew where they train again; to keep it, set "
                "requires_grad to True before the load, and freeze them after it"
            )
            log_rank0(text, logging.WARNING)

    def _read(self, packed: Mapping[str, Any], layout: Layout) -> _Saved:
        groups = [at for at, group in enumerate(packed["param_groups"]) for _ in group["params"]]
        saved = _Saved(shared=[Counter() for _ in packed["param_groups"]])
        stepped = {group for entry, group in enumerate(groups) if self._state.get(entry)}
        for entry, (shape, runs) in enumerate(self._entries(packed[KEY], layout)):
            state, group = self._state.get(entry, {}), groups[entry]
            scalars, kinds, tensor_state = dict[str, float](), set[str](), dict[str, torch.Tensor]()
            for key, value in state.items():
                if isinstance(value, Mapping):  # up to release 0.2
                    tensor_state |= {name: tensor.cpu().clone() for name, tensor in value.items()}
                elif key in self._of_wholes:
                    tensor_state[key] = value.cpu().clone()
                elif is_elementwise(key, value, shape):
                    kinds.add(key)
                elif is_scalar(key, value, shape):
                    scalars[key] = float(value)
                elif value is not None:
                    other = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
                    remedy = (
                        f"give it the shape {shape} that this rank has of it, or one number"
                        if self._keeps(key)
                        else f"{key!r} is of whole tensors, which ranks do not exchange; use "
                        "load_checkpoint"
                    )
                    saved.refusal = (
                        f"a state dict of optimizer {self._kind} has state {key!r} of shape "
                        f"{other} for {runs[0][0] if runs else entry}: {remedy}"
                    )
            if state or group not in stepped:
                saved.shared[group][tuple(sorted(scalars.items()))] += 1
            for name, run in runs:
                saved.runs.setdefault(name, []).append(run)
                saved.kinds.setdefault(name, set()).update(kinds)
                saved.group_of[name] = group
                saved.scalars[name] = scalars if state or group not in stepped else None
                if tensor_state:
                    saved.tensor_state[name] = tensor_state
        if packed[KEY].get("shared"):
            saved.shared = [Counter({tuple(sorted(of.items())): 1}) for of in packed[KEY]["shared"]]
        return saved

    def _entries(
        self, description: Mapping[str, Any], layout: Layout
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[str, _Run]]]]:
        """Yield the shape of each entry, and its runs by parameter of the whole model."""
        own = self._own
        for entry, (name, first, last) in enumerate(description.get("parts", ())):
            runs = [(own.get(name, name), _Run(first, last, entry, 0))] if first < last else []
            whole = self._shapes.get(name, ())
            yield whole if last - first == math.prod(whole) else (last - first,), runs
        for entry, places in enumerate(description.get("places", ())):  # up to release 0.2
            numel = sum(stop - start for _, start, stop in places)
            runs = [(own.get(name, name), run) for name, run in _runs_of(entry, places, layout)]
            yield (numel or 1,), runs

    def _runs(self, name: str, target: int) -> Iterator[tuple[int, _Run]]:
        """Yield (rank, run) of the elements of ``name`` that rank ``target`` owns, in order: from
        its own dict where that has them.
        """
        at, stop = self._wanted[target].get(name, (0, 0))
        while at < stop:
            fitting = [
                (rank, run)
                for rank, saved in enumerate(self._saved)
                for run in saved.runs.get(name, ())
                if run.start <= at < run.stop
            ]
            if not fitting:
                raise UnsupportedOptimizerError(
                    f"a state dict of optimizer {self._kind} has nothing for element {at} of "
                    f"{name!r}: it was saved by another rank, saved on another number of ranks, at "
                    "stage 0, or for another model. load_checkpoint takes what save_checkpoint "
                    "wrote on any ranks and at any stage."
                )
            rank, run = min(fitting, key=lambda candidate: candidate[0] != target)
            end = min(run.stop, stop)
            yield rank, _Run(at, end, run.entry, run.offset + at - run.start)
            at = end

    def held(self, flat: FlatBuffer) -> dict[str, set[str]]:
        kinds: dict[str, set[str]] = {}
        for name in flat.parameters:
            own_name = self._own.get(name, name)
            kinds[name] = set().union(*(saved.kinds.get(own_name, ()) for saved in self._saved))
        return names_by_kind(kinds)

    def read(self, entries: Sequence[StateEntry], out: torch.Tensor) -> None:
        kind, rank, size = entries[0].kind, self._ranks.rank, self._ranks.size
        names = {self._own[entry.name]: entry for entry in entries if entry.name in self._own}

        def runs(target: int) -> Iterator[tuple[str, int, _Run]]:
            for name in names:
                for source, run in self._runs(name, target):
                    if kind in self._saved[source].kinds[name]:
                        yield name, source, run

        outgoing = [
            [run for _, source, run in runs(target) if source == rank] for target in range(size)
        ]
        parts = [
            self._state[run.entry][kind].reshape(-1)[run.offset : run.offset + run.stop - run.start]
            for of_target in outgoing
            for run in of_target
        ]
        taken = list(runs(rank))
        counts = [0] * size
        for _, source, run in taken:
            counts[source] += run.stop - run.start
        sizes = [sum(run.stop - run.start for run in of_target) for of_target in outgoing]
        sent = torch.cat([part.to(out.dtype) for part in parts]) if parts else out[:0].cpu()
        received = [*self._ranks.exchange(sent, sizes, counts)]
        for name, source, run in taken:
            part, received[source] = received[source].split(
                [run.stop - run.start, len(received[source]) - run.stop + run.start]
            )
            first, _ = names[name].range
            names[name].part(out)[run.start - first : run.stop - first].copy_(part)

    def scalars(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, ParameterScalars]:
        shared = [
            dict(sum(of_group, Counter[Any]()).most_common(1)[0][0]) if any(of_group) else None
            for of_group in zip(*(saved.shared for saved in self._saved))
        ]
        scalars = {name: of for saved in self._saved for name, of in saved.scalars.items()}
        return {
            name: scalars.get(self._own[name], shared[self._group_of[name]])
            for name in parameters
            if self._own[name] not in self._new
        }

    def tensor_state(self, parameters: Mapping[str, nn.Parameter]) -> TensorsByParameter:
        by_name = {name: of for saved in self._saved for name, of in saved.tensor_state.items()}
        return {name: by_name.get(self._own[name], {}) for name in parameters}


def _runs_of(entry: int, places: Sequence[Any], layout: Layout) -> Iterator[tuple[str, _Run]]:
    """Yield (parameter, run) of the elements at ``places`` of ``layout``, which ``entry`` has."""
    offset = 0
    for key, start, stop in places:
        for name, first, numel in layout.get(key, ()):
            begin, end = max(first, start), min(first + numel, stop)
            if begin < end:
                yield name, _Run(begin - first, end - first, entry, offset + begin - start)
        offset += stop - start
