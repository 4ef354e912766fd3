"""Conditions for the flat kernels: optimizer class, settings of the groups, and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_zero.ops import dispatch
from hf_zero.ops.flat_optimizers import ADAM, LION
from hf_zero.optim.adam import Adam
from hf_zero.optim.elementwise import elementwise_base
from hf_zero.optim.lion import Lion
from hf_zero.optim.table import SegmentPart

KERNELS: dict[type, Any] = {
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, Adam), ADAM),
    Lion: LION,
}
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def reads_16_bits(optimizer: torch.optim.Optimizer, kernels: Any, device: torch.device) -> bool:
    """Whether the update of ``optimizer`` on ``device`` is a launch that reads 16-bit gradients
    directly. torch's own update first casts all of them to fp32, so it needs more memory at its
    peak than fp32 gradients take.
    """
    base = elementwise_base(type(optimizer))
    kernel = KERNELS.get(base) if base is not None else None
    if (
        kernel is None
        or not dispatch.wanted("optimizer", kernels, device)
        or kernel.name in dispatch.broken()
    ):
        return False
    # binding switches ``fused`` on for torch's classes unless the group says otherwise
    plain = [
        {**group, "fused": group.get("fused") is not False and group.get("foreach") is None}
        for group in optimizer.param_groups
    ]
    return all(is_plain(group, base) for group in plain)


def is_own(step: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is the method of the class, at most wrapped by a scheduler that counts
    calls.
    """
    function = getattr(
        step, "__wrapped__" if getattr(step, "_wrapped_by_lr_sched", False) else "__func__", None
    )
    return function is type(optimizer).step


def is_plain(group: Mapping[str, Any], base: type | None) -> bool:
    """Whether the kernels support all settings of ``group``."""
    numbers = (*group["betas"], group["weight_decay"], group.get("eps", 0.0))
    known = all(isinstance(number, (int, float)) for number in numbers) and _is_number(group["lr"])
    if base is Lion:
        return known and group["foreach"] is None
    return known and bool(group["fused"]) and not group["amsgrad"] and not group["differentiable"]


def _is_number(lr: Any) -> bool:
    return isinstance(lr, (int, float)) or (isinstance(lr, Tensor) and lr.numel() == 1)


def is_ready(part: SegmentPart, device: torch.device) -> bool:
    grad = part.flat.grad
    return (
        grad is not None
        and grad.device == device
        and grad.dtype in _GRADIENTS
        and grad.is_contiguous()
    )
