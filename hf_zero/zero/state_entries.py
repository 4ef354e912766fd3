"""State by parameter: the weights and the optimizer's state of an engine as entries, and their
transfer into an engine from whatever has such entries.

[Note: one way into state]
A checkpoint on disk or in memory, a state dict of torch, and the state that a rebuild carries over
are sources: each answers which entries it has and copies ranges of elements of them.
:func:`transfer` alone writes them into the flat buffers of an engine, in any tier, and decides how
what a source lacks begins: a state as before the first step of its parameter, as torch's optimizer
begins it. Weights that a source lacks stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.offload.storage import COMPENSATION, MASTER
from hf_zero.optim.group_scalars import ParameterScalars
from hf_zero.optim.segment_entries import is_elementwise
from hf_zero.optim.segments import FetchedArrays, ParamState, step_dtype
from hf_zero.optim.whole_tensor_state import TensorsByParameter
from hf_zero.zero.layout.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from hf_zero.zero.sharded_engine import ShardedEngine


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One number for each element of parameter ``name`` of ``flat``: its weight (the ``kind``
    :data:`MASTER`), or the optimizer's state ``kind``.
    """

    flat: FlatBuffer
    name: str
    kind: str

    @property
    def parameter(self) -> nn.Parameter:
        return self.flat.parameters[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole; along tensor and expert parallelism, of this rank's part."""
        return self.flat.layout.by_name[self.name].shape

    @property
    def range(self) -> tuple[int, int]:
        """The elements ``[start, stop)`` of the flattened parameter that this rank has."""
        first, start, stop = self.flat.spec.own_range(self.name)
        return first, first + stop - start

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return the view of these elements in ``values`` [owned] of the flat buffer."""
        _, start, stop = self.flat.spec.own_range(self.name)
        return values[start:stop]


class StateSource:
    """A holder of entries, which :func:`transfer` reads. If :meth:`read` is collective, all ranks
    have the same entries.
    """

    def held(self, flat: FlatBuffer) -> Mapping[str, Collection[str]]:
        """Return, by kind of state, the parameters of ``flat`` of which this source has every
        element that this rank owns.
        """
        raise NotImplementedError

    def read(self, entries: Sequence[StateEntry], out: torch.Tensor) -> None:
        """Copy this rank's elements of ``entries`` to ``out`` [owned], of any dtype and device."""
        raise NotImplementedError

    def scalars(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, ParameterScalars]:
        """Return, by name, the scalars of each of ``parameters`` that has some; all others begin
        without state.
        """
        return {}

    def tensor_state(self, parameters: Mapping[str, nn.Parameter]) -> TensorsByParameter | None:
        """Return by name the state of whole tensors of ``parameters``; None leaves it."""
        return None


def names_by_kind(kinds: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return by kind the names that have it, from the kinds of each name."""
    names: dict[str, set[str]] = {}
    for name, of_name in kinds.items():
        for kind in of_name:
            names.setdefault(kind, set()).add(name)
    return names


class EngineState:
    """The entries of ``engine``. Updates of offloaded state are waited for."""

    def __init__(self, engine: ShardedEngine):
        self.bound, self._mesh = engine.bound, engine.mesh
        self._initial: dict[tuple[int, torch.dtype], dict[str, object]] = {}

    def arrays(self, flat: FlatBuffer, optimizer: bool = True) -> Mapping[str, torch.Tensor]:
        """Return by kind the arrays [owned] of ``flat`` that exist, weights only unless
        ``optimizer``; offloaded ones may be copies, made where they are read.
        """
        shard = flat.optimizer_shard
        if optimizer and flat.trainable and self.bound is not None:
            return self.bound.state.arrays(shard)

        def weights(kind: str) -> torch.Tensor:
            master = shard.master
            return (flat.shard if master is None else master).detach()

        dtype = shard.contents.dtype(MASTER) if shard.has_master else flat.dtype
        return FetchedArrays({MASTER: dtype}, weights)

    def initial(self, group: int, like: torch.dtype = torch.float32) -> ParamState:
        """Return the state of a parameter of ``group`` before its first step: scalars, and tensors
        of one element. ``like``: the dtype of its master weights.
        """
        if (group, like) not in self._initial:
            state = self.bound.state.initial.of_group(group, torch.zeros(1, dtype=like))
            self._initial[group, like] = {
                kind: value if is_elementwise(kind, value, (1,)) else float(value)
                for kind, value in state.items()
            }
        return self._initial[group, like]

    def initial_elements(self, flat: FlatBuffer, name: str) -> dict[str, torch.Tensor]:
        """Return one element of each state of parameter ``name`` of ``flat`` before its first step;
        none for one that no group has.
        """
        group = self.bound.group_of.get(name)
        if group is None:
            return {}
        state = self.initial(group, flat.optimizer_shard.contents.dtype(MASTER))
        return {kind: value for kind, value in state.items() if isinstance(value, torch.Tensor)}

    def begin(self, entries: Sequence[StateEntry], out: torch.Tensor | None) -> torch.Tensor:
        """Set ``entries``, of one flat buffer and kind, to their numbers before the first step in
        ``out`` [owned], by default zeros of their dtype.
        """
        first = [self.initial_elements(entry.flat, entry.name).get(entry.kind) for entry in entries]
        if out is None:
            flat = entries[0].flat
            dtypes = [value.dtype for value in first if value is not None]
            dtype = step_dtype(flat.optimizer_shard.contents.dtype(MASTER))
            dtype = reduce(torch.promote_types, dtypes) if dtypes else dtype
            out = torch.zeros(flat.spec.owned_numel, dtype=dtype, device=flat.full.device)
        for entry, value in zip(entries, first):
            entry.part(out)[:] = 0 if value is None else value
        return out

    def read(self, entry: StateEntry, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the numbers [owned] of ``entry`` in ``arrays`` of its flat buffer, those before
        the first step if there are none.
        """
        values = arrays.get(entry.kind)
        return self.begin([entry], None) if values is None else values

    def optimizer_entries(
        self,
        flat: FlatBuffer,
        arrays: Mapping[str, torch.Tensor],
        existing: Mapping[str, Collection[str]] | None = None,
    ) -> Iterator[StateEntry]:
        """Yield the entries of the optimizer in ``flat``, with those that exist only from the first
        step on, and with those in ``existing``, by parameter, that its group does not keep with its
        present settings; None: those in the ``arrays`` of this rank.
        """
        first = {slot.name: self.initial_elements(flat, slot.name) for slot in flat.layout.slots}
        initial_kinds = {MASTER}.union(*first.values())
        others = [kind for kind in arrays if kind not in initial_kinds]
        for name, kinds in first.items():
            more = others if existing is None else sorted({*existing.get(name, ())} - kinds.keys())
            yield from (StateEntry(flat, name, kind) for kind in (*kinds, *more))

    def existing(self, names: Mapping[str, str]) -> dict[str, set[str]]:
        """Return by parameter the kinds of optimizer state that exist on any rank; ``names`` maps
        this rank's names to whole-model names. Collective.
        """
        here = {names[name]: kinds for name, kinds in self.bound.state.existing().items()}
        everywhere = dict[str, set[str]]()
        for of_rank in self._mesh.all_gather_object(here, "kinds of optimizer state"):
            for name, kinds in of_rank.items():
                everywhere.setdefault(name, set()).update(kinds)
        return {name: everywhere.get(whole, set()) for name, whole in names.items()}

    def scalars(self, names: Mapping[str, str]) -> dict[str, ParameterScalars]:
        """Return the scalars of each parameter of a group, as far as known on any rank; ``names``
        maps this rank's names to whole-model names. Collective.
        """
        return self.bound.state.scalars.by_parameter(
            names, lambda counts: self._mesh.all_gather_object(counts, "step counts")
        )


@torch.no_grad()
def transfer(
    source: StateSource,
    engine: ShardedEngine,
    weights: bool = True,
    optimizer: bool = True,
    keeps: bool = False,
) -> None:
    """Write the ``weights`` and the state of the ``optimizer`` that ``source`` has into ``engine``.

    States that it lacks begin as before the first step; with ``keeps``, only those that do not
    exist in the engine. A parameter that has no state there begins without. A caller that writes
    weights into an engine in use holds ``schedule.shards.writing()`` meanwhile, as other ranks may
    fetch shards, and refreshes the parameters afterwards (``engine.refresh_params``). Raises
    UnsupportedOptimizerError for one that the optimizer does not keep.
    """
    state, bound, without = EngineState(engine), engine.bound, set[str]()
    for flat in engine.flats:
        names_of, trains = source.held(flat), optimizer and flat.trainable
        states = [names for kind, names in names_of.items() if kind != MASTER]
        without.update(flat.parameters.keys() - set[str]().union(*states))
        if trains or (weights and MASTER in names_of):
            _transfer_flat(flat, source, names_of, state, weights, trains, keeps)
    if optimizer and bound is not None:
        parameters = {name: engine.sharded_model.parameters[name] for name in bound.group_of}
        scalars = source.scalars(parameters)
        bound.state.scalars.load(
            {n: value for n, value in scalars.items() if value or keeps or n not in without}
        )
        tensor_state = source.tensor_state(parameters)
        if tensor_state is not None:
            bound.state.tensor_state.load(tensor_state)


def _transfer_flat(
    flat: FlatBuffer,
    source: StateSource,
    names_of: Mapping[str, Collection[str]],
    state: EngineState,
    weights: bool,
    optimizer: bool,
    keeps: bool,
) -> None:
    """Write the part of :func:`transfer` that is in ``flat``."""
    shard, bound = flat.optimizer_shard, state.bound
    shard.writing()
    if not flat.trainable:
        flat.restore_views()
    begun = optimizer and bound is not None and bound.state.create_offloaded(shard)
    arrays = state.arrays(flat, optimizer)
    kinds = {*names_of, *arrays} if optimizer else {MASTER}
    entries = {
        kind: [StateEntry(flat, slot.name, kind) for slot in flat.layout.slots]
        for kind in sorted(kinds if weights else kinds - {MASTER})
    }
    missing = {
        kind: [entry for entry in of_kind if entry.name not in names_of.get(kind, ())]
        for kind, of_kind in entries.items()
    }
    errors = None  # of weights that were saved in bf16, to be added to those in fp32
    for kind, of_kind in entries.items():  # sorted: COMPENSATION comes before MASTER
        if begun and kind != MASTER and len(missing[kind]) == len(of_kind):
            continue
        out = None  # frees the last one before the next is fetched
        out = arrays.get(kind)
        if kind == COMPENSATION and (bound is None or not bound.state.keeps_errors(shard)):
            errors = torch.zeros_like(arrays[MASTER], dtype=torch.float32)
            source.read(of_kind, errors)
            continue
        if out is None:
            out = state.begin(of_kind, None)
        elif kind != MASTER and not keeps:
            out = state.begin(missing[kind], out) if missing[kind] else out
        elif len(missing[kind]) == len(of_kind):
            continue
        elif not flat.trainable:
            out = out.clone()  # others may read the shard until it is stored
        if kind in names_of:  # the same on all ranks, which ``arrays`` need not be
            source.read(of_kind, out)
            if kind == MASTER and errors is not None and out.dtype == torch.float32:
                out.add_(errors)
        if kind != MASTER:
            bound.state.load_tensor(shard, kind, out)
        elif shard.has_master:
            shard.store_master(out)
        else:
            flat.store_shard(out)
