"""A trial of the declared kernels on a device: each runs its example and must agree with its
reference.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch

from hf_zero.device import kinds
from hf_zero.ops import dispatch
from hf_zero.ops.dispatch import Kernel

# Far above the effect of rounding on a few rows, far below that of a wrong index or a lost mask.
TOLERANCE = 0.02


def declared() -> dict[str, Kernel]:
    """Return every declared kernel by its name; imports all modules of hf_zero.ops except the
    kernels' own, which import triton.
    """
    import hf_zero.ops

    for room in pkgutil.iter_modules(hf_zero.ops.__path__):
        if room.name != "triton_kernels":
            importlib.import_module(f"hf_zero.ops.{room.name}")
    return dict(dispatch.KERNELS)


def try_out(kernel: Kernel, device: torch.device) -> str:
    """Run ``kernel`` on its example on ``device``; return the reason why it is broken there, or "".

    Draws from torch's generators and restores them.
    """
    if kernel.example is None:
        return "it declares no example"
    devices = [] if kinds.is_host(device) else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        seen = []
        for body in (kernel, kernel.reference):
            torch.manual_seed(0)
            try:
                arguments = kernel.example(device)
                result = body(*arguments)
                kinds.synchronize(device)
            except Exception as error:  # the doctor reports whatever a launch raises
                return (
                    f"{type(error).__name__}: "
                    f"{(str(error).strip().splitlines() or ['no message'])[0]}"
                )
            # In-place kernels write results into their arguments.
            seen.append(list(_tensors((result, arguments))))
    if kernel.name in dispatch.broken():
        return f"cannot be compiled: {dispatch.broken()[kernel.name]}"
    for index, (one, other) in enumerate(zip(*seen, strict=True)):
        off = _distance(one, other)
        if not off <= TOLERANCE:
            return (
                f"differs from its reference: tensor {index}, {list(one.shape)}, by "
                f"{off:.2g} of its norm"
            )
    return ""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference over that of ``other``; infinite if their shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    # Equal infinities, as in a mask of scores, are no difference.
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, one.double() - other.double()).norm()
    return float(
        difference / torch.where(other.isfinite(), other.double(), 0.0).norm().clamp_min(1e-6)
    )
