"""Tensors as rows for the element-wise kernels, and the checks of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def as_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as [rows, width] with adjacent columns: a view if possible, else a copy."""
    width = tensor.shape[-1]
    rows = tensor.numel() // width if width else 0
    flat = tensor.reshape(rows, width)
    return flat if flat.stride(1) == 1 or width == 1 else flat.contiguous()


def check_float(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors have at least one axis, a dtype that kernels take, and one device.

    Raises:
        KernelError: one does not; the message has the remedy.
    """
    first_name, first = next(
        (name, tensor) for name, tensor in tensors.items() if tensor is not None
    )
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise KernelError(
                f"{op}: {name} is {tensor.dtype}; give one of {', '.join(map(str, FLOATS))}"
            )
        if tensor.dim() == 0:
            raise KernelError(f"{op}: {name} has no axis; give at least one, [width]")
        if tensor.device != first.device:
            raise KernelError(
                f"{op}: {name} is on {tensor.device} and {first_name} on "
                f"{first.device}; move one of them"
            )


def check_alike(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise KernelError unless ``tensor`` has the shape of ``other``."""
    if tensor.shape != other.shape:
        raise KernelError(
            f"{op}: {name} has shape {list(tensor.shape)} and {other_name} {list(other.shape)}; "
            "give them the same shape"
        )


def check_bias(op: str, bias: Tensor | None, x: Tensor) -> None:
    """Raise KernelError unless ``bias`` is [width of x] or None."""
    if bias is not None and bias.shape != x.shape[-1:]:
        raise KernelError(
            f"{op}: bias has shape {list(bias.shape)} for an x of width {x.shape[-1]}; give "
            "one element a column"
        )
