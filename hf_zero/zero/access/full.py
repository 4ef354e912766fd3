"""The ``safe_*`` functions, which read and write whole parameters, gradients and optimizer state.
For a parameter cut by tensor or expert parallelism, "whole" means this rank's part.
"""

from __future__ import annotations

import torch

from hf_zero.errors import PartitionError
from hf_zero.logging import listed
from hf_zero.optim.segments import masters, step_dtype
from hf_zero.zero.engine_parts import EngineParts
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, owner_of
from hf_zero.zero.layout.gradients import GradState
from hf_zero.zero.layout.parameter import LEFT_SHARDED, holder_of_whole, name_of
from hf_zero.zero.state_entries import EngineState, StateEntry


def engine_of(flat: FlatBuffer) -> EngineParts:
    engine = flat.engine_as(EngineParts)
    if engine is None:
        raise PartitionError(f"the engine of {next(iter(flat.parameters))} {LEFT_SHARDED}")
    return engine


def _owned(parameter: torch.Tensor, what: str) -> FlatBuffer:
    flat = owner_of(parameter)
    if flat is None:
        this = type(parameter).__name__
        if isinstance(parameter, torch.Tensor):
            this = f"tensor of shape {tuple(parameter.shape)}"
        raise PartitionError(
            f"{what}: this {this} belongs to no hf-zero engine; pass a parameter of the "
            "initialized model"
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
    """Return the flat buffer of ``parameter``; None for a frozen one, which has nothing to read.
    Raises PartitionError while state is away.
    """
    flat = _owned(parameter, what)
    if (engine := flat.engine_as(EngineParts)) is not None and engine.changes.away:
        engine.changes.refuse(what)
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
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(parameter.shape):
        given = f"value of shape {tuple(value.shape)}" if torch.is_tensor(value) else f"{value!r}"
        raise PartitionError(
            f"{what}: {given:.80} for parameter {name_of(parameter)} of shape "
            f"{tuple(parameter.shape)}; pass the whole tensor"
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
    if flat_to_read(param, "safe_get_full_fp32_param") is None:
        return None
    unit_of(flat).take_user_writes()
    whole = whole_of(flat, param, masters(flat.optimizer_shard))
    return whole.to(step_dtype(whole.dtype))


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set master and working weights of ``param`` to the whole ``value``, which every rank
    passes (collective).
    """
    if owner_of(param) is None:
        engine = holder_of_whole(param)
        _check_shape(param, value, "safe_set_full_fp32_param")
        if engine is not None:
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
    if flat_to_read(param, "safe_get_full_grad") is None:
        return None
    engine, own = reduced_gradient(flat)
    if own is None:
        return None
    whole = whole_of(flat, param, own.to(step_dtype(own.dtype)))
    return whole / engine.optimizer_step.gradient.held_scale(whole.device)


@torch.no_grad()
def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient for the next step; every rank passes the whole tensor."""
    if (holder := holder_of_whole(param)) is not None:
        holder.set_full_gradient(param, value)
        return
    flat = flat_to_write(param, "safe_set_full_grad")
    engine, _ = gradient_to_replace(flat, param, "safe_set_full_grad")
    own = own_part(flat, param, value, "safe_set_full_grad")
    scale = engine.optimizer_step.gradient.held_scale(value.device)
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
