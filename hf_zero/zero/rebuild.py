"""Rebuild of a live engine after its model or the groups of its optimizer have changed: parameters
that train from now on, groups that were added, parameters that were replaced.

The engine is taken apart and built again over the changed model, as another call of ``initialize``
would do. Everything else goes on: buffers keep the values of each rank. This rank's part of the
master weights and of the optimizer's state waits in host memory meanwhile, and ranks exchange it
one tensor at a time, because other flat buffers give a rank other elements. A parameter without
state begins as a new one of torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.errors import PartitionError
from hf_zero.logging import listed
from hf_zero.optim.adoption import adopt
from hf_zero.optim.group_scalars import ParameterScalars
from hf_zero.optim.whole_tensor_state import TensorsByParameter
from hf_zero.zero.access.full import join_parts
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, flat_of
from hf_zero.zero.layout.parameter import raw_grad, set_raw_grad
from hf_zero.zero.layout.parameter_views import forget
from hf_zero.zero.layout.walk import named_modules_of
from hf_zero.zero.layout.whole_names import WholeNames
from hf_zero.zero.materialize import check_alike, check_parameters, check_statistics
from hf_zero.zero.sharded_model import check_optimizer
from hf_zero.zero.state_entries import EngineState, StateEntry, StateSource, names_by_kind, transfer
from hf_zero.zero.transaction import restore_on_rollback, transaction

if TYPE_CHECKING:
    from hf_zero.zero.engine_parts import EngineParts
    from hf_zero.zero.layout.engine_plan import EnginePlan


def refuse_now(engine: EngineParts, what: str, loads: bool = False) -> None:
    """Raise PartitionError if ``engine`` cannot be rebuilt at this moment, for ``what``. Before a
    load (``loads``) the state may be half changed.
    """
    broken = loads and engine.changes.broken
    if engine.destroyed:
        raise PartitionError(f"{what} of an engine that was destroyed; call it before destroy()")
    if not broken:
        engine.changes.refuse(what)
    engine.changes.refuse_within(what)
    if engine.pass_runner.under_way:
        raise PartitionError(
            f"{what} inside a forward or backward of the model; call it after the step"
        )
    engine.changes.refuse_until_step(what)
    if engine.bound is None:
        raise PartitionError(f"{what} needs an engine with an optimizer; initialize it with one")
    engine.bound.members.check()
    if engine.mesh.dims.pipeline > 1:
        raise PartitionError(
            f"{what}: the parameters of a model in pipeline stages that train are fixed at "
            "initialize; save a checkpoint, and resume with another set"
        )
    trainable = engine.sharded_model.trainable
    if not broken and any(flat.gradient.holds_gradient for flat in trainable):
        raise PartitionError(
            f"{what} comes between a backward and the step that uses its gradients; call it after "
            "the step that ends the accumulation window, or zero_grad() before it"
        )
    pinned = [
        unit.name or "the root" for unit in engine.units if unit.sharded_flats and unit.guard.pins
    ]
    if pinned:
        raise PartitionError(
            f"{what} inside GatheredParameters of {listed(pinned, 3)}; call it after that context"
        )


class CarriedState(StateSource):
    """The state of the parameters of ``engine`` that train: this rank's elements of master weights
    and of the optimizer's state in host memory, and the scalars and the state of whole tensors of
    all ranks. Collective, and so is a transfer of it.
    """

    def __init__(self, engine: EngineParts) -> None:
        state, mesh, parameters = EngineState(engine), engine.mesh, engine.sharded_model.parameters
        shared = WholeNames(engine.module).own_of(parameters)  # the same name on all ranks
        objects = {shared[name]: parameter for name, parameter in parameters.items()}
        self._elements: dict[nn.Parameter, dict[str, tuple[int, torch.Tensor]]] = {}
        local_dtypes: dict[str, dict[str, torch.dtype]] = {}
        for flat in engine.sharded_model.trainable:
            arrays = dict(state.arrays(flat))
            for slot in flat.layout.slots:
                entries = [StateEntry(flat, slot.name, kind) for kind in arrays]
                self._elements[flat.parameters[slot.name]] = {
                    e.kind: (e.range[0], e.part(arrays[e.kind]).to("cpu", copy=True))
                    for e in entries
                }
                local_dtypes[shared[slot.name]] = {kind: v.dtype for kind, v in arrays.items()}
        self.dtypes = {
            parameters[name]: dtype for name, dtype in engine.sharded_model.param_dtypes.items()
        }
        # in host memory: a pickled tensor returns to its own device, in every process
        local_tensor_state = {
            shared[name]: {key: tensor.cpu() for key, tensor in tensors.items()}
            for name, tensors in engine.bound.state.tensor_state.by_parameter(firsts=True).items()
        }
        tensor_state = dict[str, Mapping[str, torch.Tensor]]()
        keys = dict[str, dict[str, torch.dtype]]()
        local = (local_tensor_state, local_dtypes)
        for of_rank, dtypes in mesh.all_gather_object(local, "the state of the optimizer"):
            tensor_state.update(of_rank)
            for name, of_kind in dtypes.items():
                keys.setdefault(name, {}).update(of_kind)
        self._scalars = {parameters[name]: n for name, n in state.scalars(shared).items()}
        self._dtypes = {objects[name]: of_kind for name, of_kind in keys.items() if name in objects}
        self._tensor_state = {
            objects[name]: value for name, value in tensor_state.items() if name in objects
        }

    def trains(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` had master weights."""
        return parameter in self._dtypes

    def forget(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop the state of ``parameters``."""
        for parameter in parameters:
            for by_parameter in (self._elements, self._dtypes, self._tensor_state, self._scalars):
                by_parameter.pop(parameter, None)

    def held(self, flat: FlatBuffer) -> dict[str, set[str]]:
        return names_by_kind({n: self._dtypes.get(p, ()) for n, p in flat.parameters.items()})

    def read(self, entries: Sequence[StateEntry], out: torch.Tensor) -> None:
        for entry in entries:
            if entry.kind in self._dtypes.get(entry.parameter, ()):
                first, part = self._elements[entry.parameter].get(entry.kind, (0, out[:0]))
                whole = join_parts(entry.flat, entry.parameter, first, part, out.dtype)
                entry.part(out).copy_(whole.reshape(-1)[slice(*entry.range)])

    def scalars(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, ParameterScalars]:
        return {name: self._scalars.get(parameter) for name, parameter in parameters.items()}

    def tensor_state(self, parameters: Mapping[str, nn.Parameter]) -> TensorsByParameter:
        return {
            name: self._tensor_state.get(parameter, {}) for name, parameter in parameters.items()
        }


@contextmanager
def trainable_again(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which ``parameters``, frozen for a while, are planned as those that train."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@torch.no_grad()
def rebuild(
    engine: EngineParts, what: str, change: Callable[[], None], loads: bool = False
) -> None:
    """Take ``engine`` apart, call ``change`` on its optimizer, whose groups hold the parameters
    themselves then, and build it again over the model with the state that it has. What the model
    has lost leaves the groups, and is whole. ``what`` is the caller in messages; ``loads``: a load
    follows, so that the state may be half changed, and stays refused until then. Collective.

    Raises PartitionError on all ranks in the middle of an accumulation window, and the errors of a
    checkpoint or of offloaded state whose write has failed. After an error of ``change`` or of the
    new plan, the engine goes on unchanged.
    """
    with raise_on_all_ranks(f"begin {what}"):
        refuse_now(engine, what, loads)
    broken = engine.changes.broken
    engine.quiesce(what)
    keeps = not engine.config.zero.release_frozen_state
    former = [*engine.sharded_model.parameters.values()]
    within = (flat.members for flat in engine.flats if not flat.spec.outside)
    lost = dict.fromkeys(chain.from_iterable(within))
    for parameter in engine.module.parameters():
        lost.pop(parameter, None)

    def change_groups() -> None:
        change()
        for group in engine.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in lost]

    with raise_on_all_ranks(f"plan {what}"):
        plan = _try(engine, change_groups, keeps)
    check_alike(plan)
    with engine.changes.change(what):
        state = CarriedState(engine)
        trained = [parameter for parameter in former if state.trains(parameter)]
        values = [_values(engine, parameter) for parameter in lost]
        set_by_script = [] if broken else [p for p in former if p not in lost]
        gradients = [*map(raw_grad, set_by_script)]
        before = engine.take_apart()
        change_groups()
        for parameter, value in zip(lost, values):
            forget(parameter)
            parameter.data = value
        adopt(engine.optimizer)  # its class was given back
        if not keeps:
            state.forget([parameter for parameter in trained if not parameter.requires_grad])
        with trainable_again(trained if keeps else ()):
            plan = _plan(engine)
            with transaction():
                restore_on_rollback(engine.module, engine.optimizer)
                engine.assemble(plan)
        for parameter, gradient in zip(set_by_script, gradients):
            set_raw_grad(parameter, gradient)
    if broken:
        engine.changes.break_off(broken)
    with engine.changes.change(what):
        sharded = engine.sharded_model
        for name, parameter in sharded.parameters.items():
            sharded.param_dtypes[name] = state.dtypes.get(parameter, sharded.param_dtypes[name])
        transfer(state, engine)
        engine.restore_parts(before)  # first: a refresh clears residuals in the loss scale
        engine.refresh_params()


def _values(engine: EngineParts, parameter: nn.Parameter) -> torch.Tensor:
    """Return the whole values of ``parameter``, which the model has lost (collective)."""
    flat = flat_of(parameter)
    with engine.sharded_model.gathered(unit_of(flat)) if flat.sharded else nullcontext():
        return parameter.detach().clone()


def _plan(engine: EngineParts) -> EnginePlan:
    plan = type(engine).plan(engine.module, engine.config, engine.optimizer, engine.extensions_of)
    former, modules = engine.sharded_model.modules, named_modules_of(engine.module)
    kept = frozenset(name for name, module in modules if module._buffers and module in former)
    return replace(plan, kept_buffers=kept)


def _try(engine: EngineParts, change: Callable[[], None], keeps: bool) -> EnginePlan:
    """Run ``change``, return the engine's plan, and undo the change. Raises errors of either."""
    optimizer = engine.optimizer
    before = [(group, {**group}) for group in optimizer.param_groups]
    trained = [parameter for flat in engine.sharded_model.trainable for parameter, _ in flat.items]
    try:
        for group, parameters in zip(optimizer.param_groups, engine.group_parameters):
            group["params"] = list(parameters)
        change()
        with trainable_again(trained if keeps else ()):
            plan = _plan(engine)
        sharded = set(map(id, engine.sharded_model.parameters.values()))
        units = [
            replace(unit, parameters=tuple(p for p in unit.parameters if id(p[1]) not in sharded))
            for unit in plan.units
        ]
        check_parameters(units, plan.device)
        check_statistics(plan, plan.device)
        check_optimizer(plan)
        engine.feature_set.check(plan)
        return plan
    finally:
        optimizer.param_groups[:] = [group for group, _ in before]
        for group, content in before:
            group.clear()
            group.update(content)


def groups_over(engine: EngineParts, new: Iterable[nn.Parameter], group: int | None) -> None:
    """Put the parameters ``new`` of the model into the groups of the optimizer of ``engine`` that
    hold those in whose places they are, or into ``group``. Frozen ones take over a group, too, so
    that they can train later; they are not added to ``group``.

    Raises PartitionError for a parameter that is not in the model, for a trainable one in no
    other's place, or if there is no such group.
    """
    groups, sharded = engine.optimizer.param_groups, engine.sharded_model.parameters
    names: dict[nn.Parameter, list[str]] = {}
    for name, candidate in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(candidate, []).append(name)
    group_of = {id(p): index for index, live in enumerate(groups) for p in live["params"]}
    if group is not None and not 0 <= group < len(groups):
        raise PartitionError(
            f"replace(group={group}): the optimizer has {len(groups)} groups, counted from 0"
        )
    for parameter in new:
        if parameter not in names:
            raise PartitionError(
                f"replace() was given a parameter of shape {tuple(parameter.shape)} that is not in "
                "the model; put it there first (setattr, model.resize_token_embeddings)"
            )
        if id(parameter) in group_of:
            continue
        former = next((sharded[name] for name in names[parameter] if name in sharded), None)
        index = group_of.get(id(former))
        if group is not None and parameter.requires_grad:
            index = group
        if index is None:
            if not parameter.requires_grad:
                continue
            raise PartitionError(
                f"{names[parameter][0]} takes the place of no parameter that the optimizer has; "
                "pass replace(..., group=index of a group), or call optimizer.add_param_group"
            )
        params = groups[index]["params"]
        at = next((i for i, candidate in enumerate(params) if candidate is former), len(params))
        params.insert(at, parameter)


def unfrozen(engine: EngineParts) -> list[str]:
    """Return the names of the parameters that were frozen when ``engine`` was built, require grad
    now, and are in a group of its optimizer.
    """
    trained = {id(parameter) for group in engine.group_parameters for parameter in group}
    return [
        name
        for flat in engine.flats
        if not flat.trainable
        for name in sorted(flat.parameter_views.switched)
        if flat.parameters[name].requires_grad and id(flat.parameters[name]) in trained
    ]
