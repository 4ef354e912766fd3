"""Access to this rank's part of a parameter's master weights, gradient and optimizer state, and to
gradients of several parameters at once.

A part is 1-D: the elements of the parameter that this rank owns. Their number differs between ranks
and may be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hf_zero.errors import PartitionError
from hf_zero.optim.segments import masters, step_dtype
from hf_zero.zero.access.full import (
    engine_of,
    flat_to_read,
    flat_to_write,
    gradient_to_replace,
    reduced_gradient,
    safe_get_full_grad,
    safe_set_full_grad,
    state_of,
    write_master,
    write_state,
)
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, owner_of
from hf_zero.zero.layout.parameter import name_of


def _part(flat: FlatBuffer, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    _, start, stop = flat.spec.own_range(name_of(parameter))
    return own[start:stop]


def _checked(
    flat: FlatBuffer, parameter: torch.Tensor, value: torch.Tensor, what: str
) -> torch.Tensor:
    """Return ``value``, 1-D; raise PartitionError unless this rank has as many elements."""
    _, start, stop = flat.spec.own_range(name_of(parameter))
    if not isinstance(value, torch.Tensor) or value.numel() != stop - start:
        count = f"{value.numel()} values" if torch.is_tensor(value) else f"{value!r:.80}"
        raise PartitionError(
            f"{what}: {count} for the {stop - start} elements of "
            f"{name_of(parameter)} that this rank keeps; pass as many as safe_get_local_* returns"
        )
    return value.reshape(-1)


@torch.no_grad()
def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's fp32 master weights of ``param``; None for a frozen one."""
    flat = flat_to_read(param, "safe_get_local_fp32_param")
    if flat is None:
        return None
    unit_of(flat).take_user_writes()
    part = _part(flat, param, masters(flat.optimizer_shard))
    return part.to(step_dtype(part.dtype), copy=True)


@torch.no_grad()
def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's master weights of ``param``, working weights from them (collective)."""
    flat = flat_to_write(param, "safe_set_local_fp32_param")
    write_master(flat, param, _checked(flat, param, value, "safe_set_local_fp32_param"))


@torch.no_grad()
def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of this rank's part of the averaged gradient of ``param``, without the loss
    scale; None for a frozen one, and before the first backward of a step. Collective: reduces
    unreduced gradients.
    """
    flat = flat_to_read(param, "safe_get_local_grad")
    if flat is None:
        return None
    engine, own = reduced_gradient(flat)
    if own is None:
        return None
    part = _part(flat, param, own)
    return part.to(step_dtype(part.dtype)) / engine.optimizer_step.gradient.held_scale(part.device)


@torch.no_grad()
def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient for the next step (collective)."""
    flat = flat_to_write(param, "safe_set_local_grad")
    engine, _ = gradient_to_replace(flat, param, "safe_set_local_grad")
    values = _checked(flat, param, value, "safe_set_local_grad")
    scale = engine.optimizer_step.gradient.held_scale(value.device)
    flat.gradient.write_own(name_of(param), values.to(step_dtype(values.dtype)) * scale)


@torch.no_grad()
def safe_get_local_optimizer_state(
    param: torch.Tensor, optim_state_key: str
) -> torch.Tensor | None:
    """Return a copy of this rank's part of the state ``optim_state_key`` ("exp_avg", ...) of
    ``param``; None for a frozen one.
    """
    flat = flat_to_read(param, "safe_get_local_optimizer_state")
    if flat is None:
        return None
    with engine_of(flat).optimizer_step.counted_state():
        held = state_of(flat, param, optim_state_key, "safe_get_local_optimizer_state")
        return _part(flat, param, held).clone()


@torch.no_grad()
def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Overwrite this rank's part of the optimizer state ``optim_state_key`` of ``param``."""
    what = "safe_set_local_optimizer_state"
    flat = flat_to_write(param, what)
    write_state(flat, param, optim_state_key, what, _checked(flat, param, value, what))


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor],
    update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the gradient of each parameter that has one by ``update_func(gradient, parameter)``,
    which every rank calls on the whole averaged gradient (collective). Raises PartitionError for
    what is no tensor of the gradient's shape.
    """
    for parameter in [param_list] if isinstance(param_list, torch.Tensor) else param_list:
        if owner_of(parameter) is None:
            if parameter.grad is not None:
                parameter.grad.copy_(update_func(parameter.grad, parameter))
            continue
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))
