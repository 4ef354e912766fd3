"""torch's own fused kernels: the groups that run them, the condition for passing them the gradient
scale, and workarounds for their errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_zero.optim import state
from hf_zero.optim.adam import Adam
from hf_zero.optim.table import Segment

# Classes whose fused step reads ``optimizer.grad_scale`` and ``optimizer.found_inf``, with its op.
_OPS: dict[type, str] = {
    Adam: "aten::_fused_adam_",
    torch.optim.Adam: "aten::_fused_adam_",
    torch.optim.AdamW: "aten::_fused_adamw_",
    torch.optim.SGD: "aten::_fused_sgd_",
    torch.optim.Adagrad: "aten::_fused_adagrad_",
}


def _has_kernel(op: str, device_type: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        op, torch._C._dispatch_key_for_device(device_type)
    )


def choose(base: type | None, group: dict[str, Any]) -> None:
    """Switch ``fused`` on in a group of an optimizer of class ``base`` that leaves it open, if
    there is a kernel for its tensors.
    """
    op = _OPS.get(base) if base is not None else None
    if (
        op is None
        or not group["params"]
        or group["fused"] is not None
        or group["foreach"] is not None
        or group["differentiable"]
    ):
        return
    kinds = {(tensor.dtype, tensor.device.type) for tensor in group["params"]}
    if all(dtype == torch.float32 and _has_kernel(op, device) for dtype, device in kinds):
        group["fused"] = True


def takes_scale(
    optimizer: torch.optim.Optimizer, base: type | None, found_inf: Tensor | None
) -> bool:
    """Whether every group runs a fused kernel that takes the scale and the overflow flag itself."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    if base not in _OPS or not groups or not all(group.get("fused") for group in groups):
        return False
    if base is torch.optim.SGD and found_inf is not None:
        # torch's fused SGD leaves a new momentum buffer uninitialised when its first step
        # overflows. Zeros give the same first step unless there is dampening; then the host checks
        # the flag.
        fresh = [
            (group, p)
            for group in groups
            if group["momentum"] != 0
            for p in group["params"]
            if not _has_state(optimizer, p)
        ]
        if any(group["dampening"] != 0 for group, _ in fresh):
            return False
        _begin_with_zeros(optimizer, [p for _, p in fresh])
    return True


@contextmanager
def beginning_apart(
    optimizer: torch.optim.Optimizer, base: type | None, segments: Sequence[Segment]
) -> Iterator[None]:
    """Make a step over ``segments`` safe if some tensors of a group make their first step and
    others do not.

    torch's fused SGD raises then: it initialises the momentum of all tensors of a group or of none.
    """
    unfused = []
    for number, group in enumerate(optimizer.param_groups):
        if base is not torch.optim.SGD or not (group["fused"] and group["momentum"]):
            continue
        tensors = [segment.tensor for segment in segments if segment.group == number]
        fresh = [tensor for tensor in tensors if not _has_state(optimizer, tensor)]
        if 0 < len(fresh) < len(tensors):
            if group["dampening"]:
                unfused.append(group)
            else:
                _begin_with_zeros(optimizer, fresh)
    for group in unfused:
        group["fused"] = False
    try:
        yield
    finally:
        for group in unfused:
            group["fused"] = True


def _has_state(optimizer: torch.optim.Optimizer, tensor: Tensor) -> bool:
    entries: Mapping[str, Any] = optimizer.state.get(tensor, {})
    return bool(state.kept(entries))


def _begin_with_zeros(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
