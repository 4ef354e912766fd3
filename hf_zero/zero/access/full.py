"""Temporary access to whole parameters, gradients and optimizer state: GatheredParameters and the
``safe_*`` functions. For a parameter cut by tensor or expert parallelism, "whole" means this rank's
part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_zero.distributed import process_group, world_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.logging import listed, logger
from hf_zero.optim.segments import step_dtype
from hf_zero.zero.engine_parts import EngineParts
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, flat_of, owner_of
from hf_zero.zero.layout.parameter import LEFT_SHARDED, holder_of_whole, name_of
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.gradients import GradState
from hf_zero.zero.state_entries import EngineState, StateEntry


def engine_of(flat: FlatBuffer) -> EngineParts:
    engine = flat.engine_as(EngineParts)
    if engine is None:
        raise PartitionError(f"the engine of {next(iter(flat.parameters))} {LEFT_SHARDED}")
    return engine


def _flatten(params: Any) -> list[torch.Tensor]:
    if params is None:
        return []
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, dict):
        params = params.values()
    return [tensor for item in params for tensor in _flatten(item)]


class GatheredParameters:
    """Context in which ``params`` are whole on every rank, so that scripts can read them.

    Args:
        params: a parameter, an iterable of them (None entries are skipped), or a module.
        modifier_rank: the global rank whose changes count: on exit, all ranks and the master
            weights take its values. With None, all ranks must write the same values: the exit
            compares them if there are any, and raises RankMismatchError on all ranks if they
            differ; one that alone has written raises it.
        fwd_module: accepted for scripts written for DeepSpeed, and ignored.
        enabled: False makes this a context without effect.

    All ranks must enter and leave together. Parameters that no engine owns are already whole; with
    a modifier rank they are broadcast, too. Of parameters that tensor or expert parallelism splits,
    each rank sees its own part, and a modifier rank raises PartitionError. Contexts can be nested.
    You can compute a loss from the parameters inside, and call its backward outside. If an
    exception leaves the context, writes inside it reach no other rank; a warning names them.
    """

    def __init__(
        self,
        params: object,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        del fwd_module
        self._params = _flatten(params) if enabled else []
        self._modifier = modifier_rank
        self._gathered = ExitStack()
        self._released: list[FlatBuffer] = []  # sharded ones that the exit releases
        self._watched: list[FlatBuffer] = []  # those whose writes count in this context
        self._compares = modifier_rank is None
        if modifier_rank is not None and not 0 <= modifier_rank < process_group.get_world_size():
            raise PartitionError(
                f"modifier_rank {modifier_rank} does not exist among "
                f"{process_group.get_world_size()} ranks; pass one of them or None"
            )
        if modifier_rank is not None:
            self._refuse_parts(modifier_rank)

    def _refuse_parts(self, modifier: int) -> None:
        groups = get_parallel()
        for parameter in self._params:
            axes = [a for a in sharding_of(parameter).axes if groups and groups.dims.size(a) > 1]
            if axes:
                raise PartitionError(
                    f"{name_of(parameter)} is cut over ranks by {axes[0]} parallelism, and "
                    f"modifier_rank = {modifier} would put that rank's part in the place of all "
                    "others; let each rank write its own part inside "
                    "hf_zero.summon_full_params(model, writeback=True), or give the whole tensor "
                    "to model.load_state_dict"
                )

    def __enter__(self) -> GatheredParameters:
        flats = [flat for flat in map(owner_of, self._params) if flat is not None]
        units = {
            unit_of(flat): engine_of(flat) for flat in sorted(flats, key=lambda flat: flat.index)
        }
        if self._modifier is not None:
            for engine in dict.fromkeys(units.values()):
                engine.changes.refuse_until_step("GatheredParameters with a modifier_rank")
        if not any(unit.guard.watched for unit in units):
            for engine in dict.fromkeys(units.values()):
                engine.optimizer_step.take_member_writes()
        self._released, self._watched = [], []
        # ``__exit__`` does not run after an exception here
        with ExitStack() as entered:
            for unit, engine in units.items():
                watched = unit.guard.watched
                entered.enter_context(engine.sharded_model.gathered(unit))
                entered.callback(engine.schedule.shards.end_asking)
                if not watched:
                    unit.take_user_writes()  # writes of a forward, not of this context
                    self._released += unit.sharded_flats
                    self._watched += unit.flats
                if not watched or self._modifier is not None:  # else the outer context keeps them
                    entered.callback(unit.drop_user_writes)
            self._gathered.push(entered.pop_all())
        return self

    def __exit__(self, *exc: object) -> None:
        with self._gathered:
            if exc[0] is not None:  # other ranks may not be here: nothing is sent
                written = [name for flat in self._watched for name in flat.user_writes.names()]
                if written:
                    logger.warning(
                        "%s: written inside GatheredParameters before an exception left it: the "
                        "values are lost, or this rank's alone; write them again on all ranks",
                        listed(written, 6),
                    )
                return
            self._refuse_other_shapes()
            if self._modifier is not None:
                self.keep()
                self.warn_of_writes(
                    "GatheredParameters of other parameters",
                    "give it every parameter that is written",
                    self._params,
                )
            elif self._compares:
                self._keep_equal_writes()

    @torch.no_grad()
    def _keep_equal_writes(self) -> None:
        """Copy writes that are equal on all ranks into the shards and the master weights. A rank
        that has written nothing sends nothing.

        Raises RankMismatchError if ranks have written other parameters or values.
        """
        given = {id(parameter): parameter for parameter in self._params}
        written: dict[Any, list[torch.Tensor]] = {}
        for flat in self._watched:
            for name in flat.user_writes.names():
                if id(parameter := flat.parameters[name]) in given:
                    flat.refuse_changed(name)
                    written.setdefault(engine_of(flat), []).append(parameter)
        for engine, parameters in written.items():
            names = listed([name_of(parameter) for parameter in parameters], 6)
            digest = hashlib.sha256(repr([name_of(p) for p in parameters]).encode())
            for whole in parameters:
                if not sharding_of(whole).axes:  # ranks have parts of others
                    values = whole.detach().contiguous().cpu().view(-1).view(torch.uint8)
                    digest.update(values.numpy().tobytes())
            what = f"write to {names} inside GatheredParameters(modifier_rank=None)"
            if not engine.mesh.equal_on_all(what, int(digest.hexdigest()[:15], 16)):
                raise RankMismatchError(
                    f"{names}: rank {engine.global_rank} has written values inside "
                    "GatheredParameters(modifier_rank=None) that other ranks have not; write the "
                    "same values on all ranks, or pass modifier_rank=0 and write on rank 0"
                )
            for whole in parameters:
                if flat_of(whole).sharded:
                    self._keep(whole, None)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy writes into the shards and the master weights: the modifier rank's values, or
        without one each rank's own part. Raises PartitionError before any is kept.
        """
        for parameter in self._params:
            if (flat := owner_of(parameter)) is not None:
                flat.refuse_to_store(name_of(parameter))
        for parameter in self._params:
            self._keep(parameter, self._modifier)

    def warn_of_writes(self, where: str, remedy: str, kept: Iterable[torch.Tensor] = ()) -> None:
        """Warn of writes to sharded parameters other than ``kept``, which are dropped at the exit
        of this context, ``where``.
        """
        ids = {*map(id, kept)}
        written = [
            name
            for flat in self._released
            for name in flat.user_writes.names()
            if id(flat.parameters[name]) not in ids
        ]
        if written:
            logger.warning(
                "%s: written inside %s, which drops it for sharded parameters; %s",
                listed(written, 6),
                where,
                remedy,
            )

    def _refuse_other_shapes(self) -> None:
        for parameter in self._params:
            flat = owner_of(parameter)
            if (
                flat is not None
                and tuple(parameter.shape) != flat.layout.by_name[name_of(parameter)].shape
            ):
                got, view = tuple(parameter.shape), flat.views[name_of(parameter)]
                with torch.no_grad():
                    parameter.data = view
                raise PartitionError(
                    f"{name_of(parameter)} of shape {tuple(view.shape)} was given data of shape "
                    f"{got} inside GatheredParameters, but its place in the shards is fixed; put a "
                    "new nn.Parameter into the module before hf_zero.initialize"
                )

    def _keep(self, parameter: torch.Tensor, modifier: int | None) -> None:
        flat = owner_of(parameter)
        if flat is None:
            if parameter.is_meta or modifier is None:
                return
            values = parameter.data.contiguous()
            world_group.broadcast(values, modifier)
            if values.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(values)
            return
        name = name_of(parameter)
        flat.refuse_changed(name)
        engine_of(flat).changes.refuse_until_step(f"a write to {name}")
        view = flat.views[name]
        if parameter.data_ptr() != view.data_ptr() and parameter.numel():
            view.copy_(parameter.data)  # another tensor was assigned to parameter.data
            parameter.data = view
        group = flat.mesh.group
        if modifier is not None and group is not None:
            # a part that the modifier does not have is taken from the first rank that has it
            group.broadcast(view, modifier if modifier in group.ranks else group.ranks[0])
        with engine_of(flat).schedule.shards.writing():
            flat.store_gathered(name)


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Context in which all parameters of ``model`` (an engine, a model, or a part of one) are whole
    on every rank. Collective.

    Forwards inside gather nothing, so ranks may run different numbers of them, as in generation for
    reinforcement learning. With ``writeback`` each rank keeps the writes to its own shards, also
    of a context that an exception leaves, so all ranks must write the same values. Without it,
    writes to sharded parameters are lost, with a warning.
    """
    with GatheredParameters(model) as gathered:
        gathered._compares = False
        try:
            yield
        finally:
            if writeback:  # no message: an exception may have come on this rank alone
                gathered.keep()
                gathered._watched = []
        if not writeback:
            gathered.warn_of_writes("summon_full_params", "pass writeback=True to keep it")


def _owned(parameter: torch.Tensor, what: str) -> FlatBuffer:
    flat = owner_of(parameter)
    if flat is None:
        raise PartitionError(
            f"{what}: this tensor of shape {tuple(parameter.shape)} belongs to no hf-zero engine; "
            "pass a parameter of the initialized model"
        )
    return flat


def flat_to_write(parameter: torch.Tensor, what: str) -> FlatBuffer:
    """Return the flat buffer of ``parameter``, for a write by ``what``.

    Raises PartitionError for a frozen one, and where a backward has made an update.
    """
    flat = _owned(parameter, what)
    if not flat.optimizer_shard.has_master:
        raise PartitionError(
            f"{what}: parameter {name_of(parameter)} is frozen and has no gradient or optimizer "
            "state; unfreeze it before initialize"
        )
    engine_of(flat).changes.refuse_until_step(what)
    return flat


def flat_to_read(parameter: torch.Tensor, what: str) -> FlatBuffer | None:
    """Return the flat buffer of ``parameter``; None for a frozen one, which has nothing to read."""
    flat = _owned(parameter, what)
    return flat if flat.optimizer_shard.has_master else None


def reduced_gradient(flat: FlatBuffer) -> tuple[EngineParts, torch.Tensor | None]:
    """Return the engine of ``flat`` and this rank's part of its averaged gradient, loss scale
    included: [owned]; None before the first backward of a step. Collective: reduces unreduced
    gradients.

    Raises PartitionError while momenta are sent in place of gradients, which are not averaged then,
    and after an update in the backward, which frees gradients.
    """
    engine = engine_of(flat)
    engine.changes.refuse_gradients("reading or setting a whole gradient")
    engine.reduce_gradients()
    if flat.gradient.stays_local:
        raise PartitionError(
            f"the gradients of {listed(list(flat.parameters), 6)} are not averaged over the ranks "
            "while the optimizer sends momenta in place of gradients; read and change gradients in "
            "steps that reduce them (before freeze_step)"
        )
    if flat.gradient.state is GradState.APPLIED:
        engine.changes.refuse_until_step("reading a gradient")
    return engine, flat.gradient.shard if flat.gradient.has_reduced else None


def gradient_to_replace(
    flat: FlatBuffer, parameter: torch.Tensor, what: str
) -> tuple[EngineParts, torch.Tensor]:
    """Return :func:`reduced_gradient`; raise PartitionError if there is no gradient yet."""
    engine, own = reduced_gradient(flat)
    if own is None:
        raise PartitionError(
            f"{what}: parameter {name_of(parameter)} has no gradient yet, and the next backward "
            "would overwrite one; call it between backward and step"
        )
    return engine, own


def whole_of(flat: FlatBuffer, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the whole per-element tensor, in the parameter's shape, from each rank's ``own``
    [owned] (collective).
    """
    first, start, stop = flat.spec.own_range(name_of(parameter))
    return join_parts(flat, parameter, first, own[start:stop], own.dtype)


def join_parts(
    flat: FlatBuffer, parameter: torch.Tensor, first: int, part: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a whole tensor of ``dtype`` on the device, in the parameter's shape, from the ``part``
    of each rank, 1-D, which begins at its element ``first`` (collective).
    """
    whole = torch.zeros(parameter.numel(), dtype=dtype, device=flat.full.device)
    whole[first : first + len(part)] = part
    if flat.layout.num_shards > 1:
        # bytes, because a sum of floats would lose the sign of a zero
        flat.mesh.shard.all_reduce(whole.view(torch.uint8), f"whole {name_of(parameter)}").wait()
    return whole.view(parameter.shape)


def _check_shape(parameter: torch.Tensor, value: torch.Tensor, what: str) -> None:
    if tuple(value.shape) != tuple(parameter.shape):
        raise PartitionError(
            f"{what}: value of shape {tuple(value.shape)} for parameter {name_of(parameter)} of "
            f"shape {tuple(parameter.shape)}; pass the whole tensor"
        )


def write_master(flat: FlatBuffer, parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Set this rank's master weights of ``parameter`` to ``values`` (1-D), and renew the working
    weights from them (collective).
    """
    unit_of(flat).take_user_writes()
    engine = engine_of(flat)
    with engine.schedule.shards.writing():
        flat.optimizer_shard.store_master(values, flat.spec.own_range(name_of(parameter))[1])
    engine.refresh_params([flat])


def write_state(
    flat: FlatBuffer, parameter: torch.Tensor, kind: str, what: str, values: torch.Tensor
) -> None:
    """Write ``values`` (1-D), this rank's of ``parameter``, to the state ``kind`` of ``flat``."""
    held, start = state_of(flat, parameter, kind, what), flat.spec.own_range(name_of(parameter))[1]
    flat.optimizer_shard.writing()
    engine_of(flat).bound.state.load_tensor(flat.optimizer_shard, kind, values.to(held), start)


def own_part(
    flat: FlatBuffer, parameter: torch.Tensor, value: torch.Tensor, what: str
) -> torch.Tensor:
    """Return this rank's part of ``value``, 1-D; raise PartitionError unless its shape fits."""
    _check_shape(parameter, value, what)
    first, start, stop = flat.spec.own_range(name_of(parameter))
    return value.reshape(-1)[first : first + stop - start]


@torch.no_grad()
def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole fp32 master weights of ``param``, on every rank (collective); None for a
    frozen one without master weights.
    """
    flat = owner_of(param)
    if flat is None:
        engine = holder_of_whole(param)
        return (param if engine is None else engine.updated(param)).detach().float()
    unit_of(flat).take_user_writes()
    master = flat.optimizer_shard.master
    if master is None:
        return None
    whole = whole_of(flat, param, master)
    return whole.to(step_dtype(whole.dtype))


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set master and working weights of ``param`` to the whole ``value``, which every rank
    passes (collective).
    """
    if owner_of(param) is None:
        if (engine := holder_of_whole(param)) is not None:
            engine.updated(param).copy_(value)
        param.copy_(value)
        return
    flat = flat_to_write(param, "safe_set_full_fp32_param")
    write_master(flat, param, own_part(flat, param, value, "safe_set_full_fp32_param"))


@torch.no_grad()
def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole gradient of ``param`` between backward and step: averaged over ranks,
    without the loss scale (collective).

    None before the first backward of a step, and for a parameter that the engine does not train;
    zeros for one that no backward of the step has used, also because it is frozen for a while.
    """
    flat = owner_of(param)
    if flat is None:
        holder = holder_of_whole(param)
        return param.grad if holder is None else holder.full_gradient(param)
    if not flat.optimizer_shard.has_master:
        return None
    engine, own = reduced_gradient(flat)
    if own is None:
        return None
    whole = whole_of(flat, param, own.to(step_dtype(own.dtype)))
    return whole / engine.optimizer_step.held_scale(whole.device)


@torch.no_grad()
def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient for the next step; every rank passes the whole tensor."""
    if (holder := holder_of_whole(param)) is not None:
        holder.set_full_gradient(param, value)
        return
    flat = flat_to_write(param, "safe_set_full_grad")
    engine, _ = gradient_to_replace(flat, param, "safe_set_full_grad")
    own = own_part(flat, param, value, "safe_set_full_grad")
    scale = engine.optimizer_step.held_scale(value.device)
    # a product in fp16 would overflow: the scale is about its largest number
    flat.gradient.write_own(name_of(param), own.to(step_dtype(own.dtype)) * scale)


def state_of(flat: FlatBuffer, parameter: torch.Tensor, kind: str, what: str) -> torch.Tensor:
    """Return the state ``kind`` [owned] of ``flat``, in which ``parameter`` has its elements."""
    engine, name = engine_of(flat), name_of(parameter)
    state, kinds, bound = EngineState(engine), set[str](), engine.bound
    arrays = state.arrays(flat)
    # in host memory and in files there is state before the first step
    if engine.global_steps > engine.skipped_steps or bound.state.writes:
        kinds = {each.kind for each in state.optimizer_entries(flat, arrays) if each.name == name}
    if kind not in kinds:
        raise PartitionError(
            f"{what}: the optimizer keeps no state {kind!r} for {name}; it keeps {sorted(kinds)} "
            "(empty before the first step)"
        )
    return state.read(StateEntry(flat, name, kind), arrays)


@torch.no_grad()
def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return the whole optimizer state ``optim_state_key`` ("exp_avg", ...) of ``param``, on every
    rank (collective); None for a frozen one.
    """
    if (engine := holder_of_whole(param)) is not None:
        return engine.full_optimizer_state(param, optim_state_key)
    flat = flat_to_read(param, "safe_get_full_optimizer_state")
    if flat is None:
        return None
    with engine_of(flat).optimizer_step.counted_state():
        held = state_of(flat, param, optim_state_key, "safe_get_full_optimizer_state")
        return whole_of(flat, param, held)


@torch.no_grad()
def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Overwrite state ``optim_state_key`` of ``param``; every rank passes the whole tensor."""
    if (engine := holder_of_whole(param)) is not None:
        engine.full_optimizer_state(param, optim_state_key).copy_(value)
        return
    what = "safe_set_full_optimizer_state"
    flat = flat_to_write(param, what)
    write_state(flat, param, optim_state_key, what, own_part(flat, param, value, what))
