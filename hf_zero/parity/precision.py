"""The reference engine in 16 bits: what it casts, and its loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``function`` of the tensors in its containers."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: mapped(item, function) for key, item in value.items()}
        return type(value)(**changed) if hasattr(value, "to_tuple") else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def floats(value: Any) -> Any:
    """Return ``value`` with its 16-bit tensors in fp32."""
    return mapped(value, lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t)


def is_castable(parameter: torch.Tensor) -> bool:
    """Return whether a 16-bit model casts ``parameter``: no quantized one, and no frozen fp64."""
    if parameter.dtype not in FLOATS:
        return False
    if parameter.requires_grad:
        return True
    return type(parameter) is nn.Parameter and parameter.dtype != torch.float64


def kept_in_fp32(module: nn.Module, precision: str, configured: Iterable[str]) -> set[str]:
    """Return the names of the parameters that compute in fp32: those in which a name ``configured``
    or declared by a model of Transformers is a part.
    """
    attributes = ["_keep_in_fp32_modules_strict"]
    attributes += ["_keep_in_fp32_modules"] if precision == "fp16" else []
    parts = [("", part) for part in configured]
    for prefix, part_of in module.named_modules():
        for attribute in attributes:
            parts += [(prefix, part) for part in getattr(part_of, attribute, None) or ()]
    return {
        name
        for name, _ in module.named_parameters()
        for prefix, part in parts
        if name.startswith(prefix) and f".{part}." in f".{name[len(prefix) :].lstrip('.')}."
    }


class LossScale:
    """The factor on the loss that keeps fp16 gradients representable; 1 in other precisions.

    Dynamic: an overflow halves it once ``hysteresis`` others have passed; ``loss_scale_window``
    steps without one double it. The first step of a run and the first after an overflow do not
    count.
    """

    def __init__(self, config: ZeroConfig, hysteresis: int | None = None):
        fp16, is_fp16 = config.fp16, config.precision == "fp16"
        self.dynamic = is_fp16 and not fp16.loss_scale
        self.scale = float(fp16.loss_scale or 2.0**fp16.initial_scale_power) if is_fp16 else 1.0
        self.skips = is_fp16 or (config.precision == "bf16" and config.bf16.check_grad_overflow)
        self.window, self.minimum = fp16.loss_scale_window, float(fp16.min_loss_scale)
        self.hysteresis, self.refills = hysteresis or fp16.hysteresis, fp16.consecutive_hysteresis
        self.left, self.good_steps = self.hysteresis, -1

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, or after one that ``overflow`` has skipped."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = -1
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good_steps += 1
        if self.refills:
            self.left = self.hysteresis
        if self.good_steps >= self.window:
            self.scale, self.good_steps, self.left = self.scale * 2, 0, self.hysteresis
