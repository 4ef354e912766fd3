"""Kernels of attention on one block of queries and keys: torch's own flash and memory-efficient
ones, which return and take log-sum-exps.

The forward of a block is a softmax over its keys. The backward gets the output and log-sum-exps of
the softmax over all keys, with which the kernels compute the block's share of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_zero.device import kinds
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.blocks import Pattern
from hf_zero.parallel.sequence.division import CONTEXT, KEY

aten = torch.ops.aten
_ALIGNED = 32  # the memory-efficient backward needs a multiple of so many log-sum-exps


class Kernels(NamedTuple):
    """Kernels of a type of device, on [blocks, tokens, heads(, D)].

    ``attend``: from pattern, query, key, value and scale to output and log-sum-exps. ``gradients``:
    from pattern, gradient of the output, query, key, value, output, log-sum-exps and scale to the
    gradients of query, key and value.
    """

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gradients: Callable[..., list[torch.Tensor]]


def kernels_on(device: torch.device) -> Kernels:
    """Return the kernels for ``device``. Raises ConfigError if there are none."""
    if device.type not in KERNELS:
        raise ConfigError(
            f"ring attention has kernels for {', '.join(sorted(KERNELS))}, and none for "
            f"{device.type}; write {KEY} in place of {CONTEXT}"
        )
    return KERNELS[device.type]


def _on_cpu(
    *tensors: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)


def _on_cpu_backward(*tensors: torch.Tensor, causal: bool, scale: float) -> Sequence[torch.Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, causal, scale=scale
    )


def _on_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )[:2]
    out, sums, *_ = aten._scaled_dot_product_efficient_attention(
        query, *_repeated(query, key, value), None, True, 0.0, causal, scale=scale
    )
    return out, sums[..., : query.shape[2]]


def _on_gpu_backward(*tensors: torch.Tensor, causal: bool, scale: float) -> Sequence[torch.Tensor]:
    grad, query, key, value, out, sums = tensors
    if query.dtype != torch.float32:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout of 0
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, query.shape[2], key.shape[2], 0.0, causal, seed, seed, scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64)
    *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, *_repeated(query, key, value), None, out,
        F.pad(sums, (0, -sums.shape[-1] % _ALIGNED), value=math.inf), seed, seed, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    grads[1:] = (grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in grads[1:])
    return grads


def _on_blocks(
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    backward: Callable[..., Sequence[torch.Tensor]],
) -> Kernels:
    """Return kernels that call ``forward`` and ``backward`` on [blocks, heads, tokens(, D)]."""

    def attend(
        pattern: Pattern, *tensors: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, causal = tensors[-1].shape[-1], pattern is not Pattern.FULL
        out, sums = forward(*_to_kernel(pattern, *tensors), causal=causal, scale=scale)
        return _from_kernel(pattern, out)[..., :width], _from_kernel(pattern, sums)

    def gradients(pattern: Pattern, *tensors: torch.Tensor, scale: float) -> list[torch.Tensor]:
        causal = pattern is not Pattern.FULL
        grads = backward(*_to_kernel(pattern, *tensors), causal=causal, scale=scale)
        widths = (tensor.shape[-1] for tensor in tensors[1:4])
        return [_from_kernel(pattern, grad)[..., :width] for grad, width in zip(grads, widths)]

    return Kernels(attend, gradients)


# by type of device
KERNELS = {
    "cpu": _on_blocks(_on_cpu, _on_cpu_backward),
    **dict.fromkeys(kinds.FLASH, _on_blocks(_on_gpu, _on_gpu_backward)),
}


def _to_kernel(pattern: Pattern, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Convert [blocks, tokens, heads(, D)] to [blocks, heads, tokens(, D)], with one D for all, a
    multiple of eight, and the tokens backwards in ``REVERSED`` blocks.

    In memory, the heads of a token stay side by side, and log-sum-exps are contiguous: the kernels
    for GPUs read outputs and log-sum-exps as they write them, whatever their strides.
    """
    width = max(tensor.shape[-1] for tensor in tensors if tensor.dim() == 4)
    width = -(-width // 8) * 8
    converted = []
    for t in tensors:
        if t.dim() == 4 and t.shape[-1] < width:
            t = F.pad(t, (0, width - t.shape[-1]))
        t = (t.flip(1) if pattern is Pattern.REVERSED else t).transpose(1, 2)
        converted.append(t.contiguous() if t.dim() == 3 else t)
    return converted


def _from_kernel(pattern: Pattern, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.flip(2) if pattern is Pattern.REVERSED else tensor).transpose(1, 2)


def _repeated(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Repeat the heads of keys and values for a kernel that has as many as of queries."""
    repeats = query.shape[1] // tensors[0].shape[1]
    return [tensor.repeat_interleave(repeats, dim=1) for tensor in tensors]
