"""State dicts of an engine that torch.distributed.checkpoint reads and writes: each rank gives and
takes the elements that it owns (``tensor_part.py``), without a gather, or gathers whole tensors of
the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from hf_zero.checkpoint.manifest import MASTER
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.checkpoint.tensor_part import PartPosition, TensorPart
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed
from hf_zero.offload.storage import COMPENSATION
from hf_zero.optim.group_settings import NOT_KEPT
from hf_zero.optim.segments import ParamGroup
from hf_zero.zero.access.full import whole_of
from hf_zero.zero.access.wholes import version_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.sharding import own_part, sharding_of
from hf_zero.zero.layout.whole_names import WholeNames, persistent_buffers
from hf_zero.zero.state_entries import EngineState, StateEntry, StateSource, names_by_kind, transfer
from hf_zero.zero.training_engine import TrainingEngine

States = dict[str, Any]


class EngineTensors:
    """The elements of an engine's parameters on this rank, under their names in the model.
    ``on_host``: tensors are given in host memory, each copied there by itself. ``loads``: a load
    follows. The constructor, collective, makes the engine train parameters unfrozen since the last
    step, waits for updates and takes a script's writes.
    """

    def __init__(self, engine: TrainingEngine, on_host: bool = False, loads: bool = False):
        self.engine, self._on_host = engine, on_host
        engine.rebuild_if_unfrozen(loads)
        version_of(engine)  # updates are complete, and a script's writes are in the shards
        self._state = EngineState(engine)
        self._names = names = WholeNames(engine.module)
        self.tied: dict[str, list[str]] = {}
        for tied, name in engine.aliases.items():
            self.tied.setdefault(name, []).append(strip_wrappers(names.own(tied)))
        self.slots = [
            (flat, slot.name, strip_wrappers(names.own(slot.name)))
            for flat in engine.flats
            for slot in flat.layout.slots
        ]
        buffers = persistent_buffers(engine.module)
        self.buffers = {strip_wrappers(names.own(name)): value for name, value in buffers.items()}
        self.extra = {
            strip_wrappers(f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE): module
            for path, module in engine.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        # those of the model: of others there is only the optimizer's state
        self.weight_slots = [slot for slot in self.slots if not slot[0].spec.outside]
        # names in the whole model, those of other ranks' experts included
        keys = [*buffers, *engine.aliases, *(slot for _, slot, _ in self.weight_slots)]
        self.model_names = {strip_wrappers(name) for key in keys for name in names.every(key)}
        self.model_names.update(self.extra)

    def part(self, entry: StateEntry, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a copy of this rank's elements of ``entry`` from ``values`` [owned]."""
        shard = entry.part(values).detach()
        local = shard.to("cpu", copy=True) if self._on_host else shard.clone()
        yield strip_wrappers(self._names.own(entry.name)), TensorPart(local, _position(entry))

    def gather(self, entry: StateEntry, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors in place of the part, one for each rank's module (collective)."""
        value = whole_of(entry.flat, entry.parameter, values)
        for alias, joined in self._names.wholes(entry.parameter, value, entry.name):
            yield strip_wrappers(alias), joined

    def check(self, entry: StateEntry, value: object, key: str) -> None:
        """Raise CheckpointError unless ``value``, named ``key``, can be read as ``entry``."""
        position = _position(entry)
        first, numel = position.start, entry.range[1] - position.start
        if not torch.is_tensor(value) or value.is_meta:
            description = "a tensor without data" if torch.is_tensor(value) else repr(value)
        elif isinstance(value, TensorPart):
            if value.position == position and value.local.numel() == numel:
                return
            description = (
                f"elements {value.position.start} to {value.position.start + value.local.numel()} "
                f"of a tensor of shape {tuple(value.shape)}"
            )
        elif tuple(value.shape) in (position.shape, position.whole):
            return
        else:
            description = f"a tensor of shape {tuple(value.shape)}"
        raise CheckpointError(
            f"{key}: {description} in the state dict, where the model has a tensor of shape "
            f"{position.whole} and this rank owns its elements {first} to {first + numel}; "
            "take the state dict of this engine, or whole tensors of the same model"
        )

    def from_rank0(self, state: object) -> object:
        """Return the ``state`` of rank 0 on every rank (collective): tensors one at a time, those
        of this engine's parameters as parts.
        """
        mesh, by_fqn = self.engine.mesh, dict[str, tuple[FlatBuffer, str]]()
        for flat, name, fqn in self.slots:
            by_fqn.update(dict.fromkeys((fqn, *self.tied.get(name, ())), (flat, name)))
        first = mesh.peers is None or mesh.rank == mesh.ranks[0]
        shapes = mesh.broadcast_object(_mapped(state, lambda path, value: value.to("meta")))
        values = dict[tuple[object, ...], torch.Tensor]()
        if first:
            _mapped(state, values.__setitem__)

        def sent(path: tuple[object, ...], like: torch.Tensor) -> torch.Tensor:
            value = torch.empty(like.shape, dtype=like.dtype, device=mesh.device)
            if first:
                value.copy_(values[path])
            mesh.broadcast(value)
            matching = [key for key in path if key in by_fqn]
            if matching and like.dim():
                entry = StateEntry(*by_fqn[matching[0]], MASTER)
                position = _position(entry)
                if tuple(like.shape) == position.whole:
                    return TensorPart(_own_elements(entry, value).clone(), position)
            return value.cpu()

        return _mapped(shapes, sent)

    def weights(self, trainable_only: bool) -> States:
        """Return copies of this rank's weights, the buffers and the extra state of modules."""
        state: States = {}
        for flat, slots in groupby(self.weight_slots, itemgetter(0)):
            if flat.trainable or not trainable_only:
                values = self._state.arrays(flat, optimizer=False)[MASTER]
                for _, name, _ in slots:
                    for fqn, part in self.part(StateEntry(flat, name, MASTER), values):
                        state.update(dict.fromkeys((fqn, *self.tied.get(name, ())), part))
        extra = {name: module.get_extra_state() for name, module in self.extra.items()}
        buffers = {
            name: value.to("cpu") if self._on_host else value
            for name, value in self.buffers.items()
        }
        return state | buffers | extra

    @torch.no_grad()
    def load_weights(
        self, state: Mapping[str, torch.Tensor], strict: bool
    ) -> nn.modules.module._IncompatibleKeys:
        """Load what :meth:`weights` returns, or whole tensors, and renew the working weights
        (collective). Raises CheckpointError, before anything is written, for other shapes and, if
        ``strict``, for other names.
        """
        source, missing = _LoadedStates(), {*self.buffers, *self.extra} - state.keys()
        for flat, name, fqn in self.weight_slots:
            keys = [key for key in (fqn, *self.tied.get(name, ())) if key in state]
            if keys:
                entry = StateEntry(flat, name, MASTER)
                self.check(entry, state[keys[0]], keys[0])
                source.add(entry, state[keys[0]])
            else:
                missing.add(fqn)
        unexpected = sorted(state.keys() - self.model_names)
        if strict and (missing or unexpected):
            raise _differs("state dict", "model", sorted(missing), unexpected)
        for name, value in self.buffers.items():
            if name in state and state[name].shape != value.shape:
                raise CheckpointError(
                    f"{name}: a tensor of shape {tuple(state[name].shape)} in the state dict, a "
                    f"buffer of shape {tuple(value.shape)} in the model; take the state dict of "
                    "the same model"
                )
        with self.engine.schedule.shards.writing():
            transfer(source, self.engine, optimizer=False)
        for name, value in self.buffers.items():
            if name in state:
                value.copy_(state[name])
        for name, module in self.extra.items():
            if name in state:
                module.set_extra_state(state[name])
        self.engine.refresh_params()
        return nn.modules.module._IncompatibleKeys(sorted(missing), unexpected)

    def trained(self) -> list[tuple[FlatBuffer, str, str]]:
        """Return the flat buffer, the name and the name in the model of each trained parameter."""
        return [slot for slot in self.slots if slot[0].trainable]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the scalars that the optimizer keeps for each trained parameter (collective)."""
        bound = self.engine.bound
        groups = bound.group_of
        saved = self._state.scalars(self._names.own_of(groups))

        def initial(name: str) -> dict[str, float]:
            state = self._state.initial(groups[name]).items()
            return {kind: value for kind, value in state if not torch.is_tensor(value)}

        return {name: saved[name] or initial(name) for _, name, _ in self.trained()}

    def optimizer(self, gathers: bool = False) -> States:
        """Return the state dict of the optimizer (collective): of parts or, if it ``gathers``, of
        whole tensors, those in host memory on the first rank only.
        """
        bound, state = self.engine.bound, dict[str, States]()
        read = self.gather if gathers else self.part
        dropped = gathers and self._on_host and self.engine.global_rank != 0
        names = {
            name: self._names.every(name) if gathers else (self._names.own(name),)
            for _, name, _ in self.trained()
        }
        if bound.state.tensor_state.by_parameter():
            raise CheckpointError(
                f"{type(self.engine.optimizer).__name__} keeps sums of whole tensors, for which "
                "torch.distributed.checkpoint has no names; use engine.save_checkpoint"
            )
        for name, scalars in self.scalars().items():
            for alias in names[name]:
                state[strip_wrappers(alias)] = {
                    key: torch.tensor(float(value)) for key, value in scalars.items()
                }
        existing = self._state.existing(self._names.own_of(bound.group_of))
        for flat, _ in groupby(self.trained(), itemgetter(0)):
            arrays = dict(self._state.arrays(flat))
            for entry in self._state.optimizer_entries(flat, arrays, existing):
                for fqn, tensor in read(entry, self._state.read(entry, arrays)):
                    result = tensor.new_empty(0) if dropped else tensor
                    state[fqn][entry.kind] = result.cpu() if self._on_host else result
        optimizer = self.engine.optimizer
        groups = [
            {key: optimizer.defaults.get(key) if key in NOT_KEPT else v for key, v in group.items()}
            | {"params": []}
            for group in optimizer.param_groups
        ]
        for name, every in names.items():
            groups[bound.group_of[name]]["params"] += map(strip_wrappers, every)
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_optimizer(self, content: States, strict: bool) -> None:
        """Load a state dict as :meth:`optimizer` returns it (collective).

        Raises CheckpointError, before anything is written, if state is missing (with ``strict``),
        unknown or of other shapes, or if its groups are divided in another way.
        """
        if lacking := sorted({"state", "param_groups"} - content.keys()):
            raise CheckpointError(
                f"the optimizer's state dict lacks {listed(lacking)}; pass one of "
                "get_optimizer_state_dict"
            )
        scalars, source, bound = self.scalars(), _LoadedStates(), self.engine.bound
        missing, unexpected = list[str](), list[str]()
        existing = self._state.existing(self._names.own_of(bound.group_of))
        for flat, slots in groupby(self.trained(), itemgetter(0)):
            entries: dict[str, list[StateEntry]] = {}
            for entry in self._state.optimizer_entries(flat, self._state.arrays(flat), existing):
                entries.setdefault(entry.name, []).append(entry)
            for _, name, fqn in slots:
                shards, values = entries.get(name, ()), content["state"].get(fqn, {})
                values = {key: value for key, value in values.items() if value is not None}
                kinds, group = {entry.kind for entry in shards}, bound.group_of[name]
                further = [
                    StateEntry(flat, name, key)
                    for key in values.keys() - kinds
                    if key == COMPENSATION or bound.state.initial.is_switched_off(group, key)
                ]
                shards = [*shards, *further]
                expected = scalars[name].keys() | {entry.kind for entry in shards}
                missing += [f"{fqn}.{key}" for key in expected - values.keys()]
                unexpected += [f"{fqn}.{key}" for key in values.keys() - expected]
                source.set_scalars(
                    name, {k: float(values.get(k, v)) for k, v in scalars[name].items()}
                )
                for entry in shards:
                    if entry.kind in values:
                        self.check(entry, values[entry.kind], f"{fqn}.{entry.kind}")
                        source.add(entry, values[entry.kind])
        if strict and (missing or unexpected):
            kind = type(self.engine.optimizer).__name__
            raise _differs(
                "optimizer's state dict", f"optimizer ({kind})", sorted(missing), sorted(unexpected)
            )
        groups = self._groups(content["param_groups"], strict)
        bound.settings.load(groups)
        transfer(source, self.engine, weights=False, keeps=True)

    def _groups(self, saved: Sequence[ParamGroup], strict: bool) -> list[dict[str, object]]:
        """Return the settings for each group of the engine, from the group in ``saved`` that has
        its parameters; by number if none of them has a group there.
        """
        bound = self.engine.bound
        names_by_group: list[list[str]] = [[] for _ in bound.groups]
        for _, name, fqn in self.trained():
            names_by_group[bound.group_of[name]].append(fqn)
        holder = {fqn: at for at, group in enumerate(saved) for fqn in group.get("params", ())}
        settings = [{k: v for k, v in group.items() if k != "params"} for group in saved]
        result = []
        for number, names in enumerate(names_by_group):
            places = sorted({holder[fqn] for fqn in names if fqn in holder})
            if not places and len(saved) == len(names_by_group):
                places = [number]
            if not places and names and strict:
                raise CheckpointError(
                    f"the optimizer's state dict has no group with {listed(names, 3)}, which "
                    f"group {number} of the optimizer updates; pass that of an optimizer with the "
                    "same groups, or StateDictOptions(strict=False)"
                )
            if any(settings[at] != settings[places[0]] for at in places):
                raise CheckpointError(
                    f"the parameters of group {number} of the optimizer are in groups "
                    f"{listed(map(str, places))} of the state dict, whose settings differ; build "
                    "the optimizer with the groups it was saved with"
                )
            result.append(settings[places[0]] if places else {})
        return result


class _LoadedStates(StateSource):
    """Tensors of a state dict, by parameter and kind: parts of this rank, or whole ones; and the
    scalars of parameters.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._scalars: dict[str, dict[str, float]] = {}

    def add(self, entry: StateEntry, value: torch.Tensor) -> None:
        self._tensors.setdefault(entry.name, {})[entry.kind] = value

    def set_scalars(self, name: str, scalars: dict[str, float]) -> None:
        self._scalars[name] = scalars

    def held(self, flat: FlatBuffer) -> dict[str, set[str]]:
        return names_by_kind({name: self._tensors.get(name, ()) for name in flat.parameters})

    def read(self, entries: Sequence[StateEntry], out: torch.Tensor) -> None:
        for entry in entries:
            value = self._tensors.get(entry.name, {}).get(entry.kind)
            if value is not None:
                if not isinstance(value, TensorPart):
                    value = _own_elements(entry, value)
                else:
                    value = value.local
                entry.part(out).copy_(value)

    def scalars(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, float]]:
        return self._scalars


def _position(entry: StateEntry) -> PartPosition:
    return PartPosition(tuple(entry.shape), entry.range[0], sharding_of(entry.parameter).box)


def _own_elements(entry: StateEntry, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of the ``whole`` tensor of ``entry``, which may be a DTensor."""
    value = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    return own_part(sharding_of(entry.parameter), value).reshape(-1)[slice(*entry.range)]


def _differs(what: str, of: str, missing: list[str], unexpected: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the {what} lacks {listed(missing, 6) or 'nothing'} and has "
        f"{listed(unexpected, 6) or 'nothing'} besides; pass that of the same {of}, or "
        "StateDictOptions(strict=False)"
    )


def _mapped(
    value: object,
    change: Callable[[tuple[object, ...], torch.Tensor], object],
    path: tuple[object, ...] = (),
) -> object:
    """Return ``value`` with ``change(path, tensor)`` for each tensor in its dicts and lists."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: _mapped(child, change, (*path, key)) for key, child in value.items()}
    if isinstance(value, list):
        return [_mapped(child, change, (*path, at)) for at, child in enumerate(value)]
    return value


def nested_optimizer_state(flattened: Mapping[str, object], states: EngineTensors) -> States:
    """Return the nested form of a state dict of ``flatten_optimizer_state_dict``."""
    bound, state = states.engine.bound, dict[str, States]()
    for path, value in flattened.items():
        if path.startswith("state."):
            fqn, _, key = path.removeprefix("state.").rpartition(".")
            state.setdefault(fqn, {})[key] = value
    groups: list[States] = [{"params": []} for _ in bound.groups]
    for _, name, fqn in states.trained():
        number = bound.group_of[name]
        paths = {key: f"param_groups.{fqn}.{key}" for key in bound.groups[number]}
        if values := {key: flattened[path] for key, path in paths.items() if path in flattened}:
            groups[number].update(values)
            groups[number]["params"].append(fqn)
    return {"state": state, "param_groups": groups}
