"""Checks of tensors before a kernel gets raw pointers to them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError

# the constants of kernels/cpu/kernels.h
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SIGNED_BLOCKS, UNSIGNED_BLOCKS = 3, 4
FLOATS = tuple(KINDS)
FP32 = (torch.float32,)


def flat(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...] | None,
    numel: int | None = None,
) -> Tensor:
    """Return ``tensor`` if it is 1-D, contiguous, on the CPU, of one of ``dtypes`` (None: any) and
    of ``numel`` elements.

    Raises:
        KernelError: it is not; the message has the remedy.
    """
    if tensor.device.type != "cpu":
        raise KernelError(
            f"{op}: {name} is on {tensor.device}; host kernels take CPU tensors: copy it with "
            ".cpu(), or update it on its device"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise KernelError(
            f"{op}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; give a "
            "contiguous 1-D view of it"
        )
    if dtypes is not None and tensor.dtype not in dtypes:
        raise KernelError(
            f"{op}: {name} is {tensor.dtype}; give one of {', '.join(map(str, dtypes))}"
        )
    if numel is not None and tensor.numel() != numel:
        raise KernelError(
            f"{op}: {name} has {tensor.numel()} elements and the others have "
            f"{numel}; cut them alike"
        )
    return tensor


def rows_of_bytes(op: str, messages: Tensor, nbytes: int, said: str) -> None:
    """Raise KernelError unless ``messages`` is contiguous, uint8 [rows, nbytes]; ``said`` names the
    messages in the error.
    """
    if (
        messages.dtype != torch.uint8
        or messages.dim() != 2
        or messages.shape[1] != nbytes
        or not messages.is_contiguous()
    ):
        raise KernelError(
            f"{op}: messages are {messages.dtype} of shape {tuple(messages.shape)}; {said} are "
            f"contiguous rows of {nbytes} bytes"
        )


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def kind(tensor: Tensor | None) -> int:
    return 0 if tensor is None else KINDS[tensor.dtype]
