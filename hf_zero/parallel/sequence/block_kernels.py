"""Kernels of attention on one block of queries and keys: torch's own flash and memory-efficient
ones, which return and take log-sum-exps.

The forward of a block is a softmax over its keys. The backward gets the output and log-sum-exps of
the softmax over all keys, with which the kernels compute the block's share of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.blocks import Pattern
from hf_zero.parallel.sequence.division import CONTEXT, KEY

aten: Any = torch.ops.aten
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


def _attend(
    pattern: Pattern, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width, causal = value.shape[-1], pattern is not Pattern.FULL
    query, key, value = _to_kernel(pattern, query, key, value)
    if query.device.type == "cpu":
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    elif query.dtype == torch.float32:
        key, value = _repeated(query, key, value)
        out, sums, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        sums = sums[..., : query.shape[2]]
    else:
        out, sums, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
    return _from_kernel(pattern, out)[..., :width], _from_kernel(pattern, sums)


def _gradients(pattern: Pattern, *tensors: torch.Tensor, scale: float) -> list[torch.Tensor]:
    _, *inputs, _, _ = tensors
    widths, heads = [each.shape[-1] for each in inputs], inputs[1].shape[2]
    causal = pattern is not Pattern.FULL
    grad, query, key, value, out, sums = _to_kernel(pattern, *tensors)
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, causal, scale=scale
        )
    elif query.dtype == torch.float32:
        repeated = _repeated(query, key, value)
        sums = F.pad(sums, (0, -sums.shape[-1] % _ALIGNED))
        seed = torch.zeros((), dtype=torch.int64)  # of a dropout of 0, as is the offset
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, *repeated, None, out, sums, seed, seed, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        grads[1:] = (each.unflatten(1, (heads, -1)).sum(2) for each in grads[1:])
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, sums, None, None, query.shape[2], key.shape[2], 0.0,
            causal, seed, seed, scale=scale,
        )  # fmt: skip
    return [_from_kernel(pattern, each)[..., :width] for each, width in zip(grads, widths)]


KERNELS = dict.fromkeys(("cpu", "cuda"), Kernels(_attend, _gradients))


def _to_kernel(pattern: Pattern, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Convert [blocks, tokens, heads(, D)] to [blocks, heads, tokens(, D)], with one D for all, a
    multiple of eight, and the tokens backwards in ``REVERSED`` blocks.
    """
    width = max(each.shape[-1] for each in tensors if each.dim() == 4)
    given = []
    for each in tensors:
        each = each.transpose(1, 2)
        if each.dim() == 4:
            each = F.pad(each, (0, -(-width // 8) * 8 - each.shape[-1]))
        given.append(each.flip(2) if pattern is Pattern.REVERSED else each)
    return given


def _from_kernel(pattern: Pattern, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.flip(2) if pattern is Pattern.REVERSED else tensor).transpose(1, 2)


def _repeated(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Repeat the heads of keys and values for a kernel that has as many as of queries."""
    repeats = query.shape[1] // tensors[0].shape[1]
    return [each.repeat_interleave(repeats, dim=1) for each in tensors]
