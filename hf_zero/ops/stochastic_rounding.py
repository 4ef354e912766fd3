"""Stochastic rounding of fp32 to bf16: up with the probability of the cut-off part, so that sums of
small changes are right on average where rounding to nearest loses them (Gupta et al. 2015,
arXiv:1502.02551).

The random bits of an element are a hash of a key and of the index of the element
(``kernels/cpu/rounding.h``): they do not depend on how a range is cut into calls, and the host's
core, the Triton kernel and the reference give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import native, reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.native import FP32, address, flat

PIECE = 1 << 20  # elements of which the reference has the random bits at a time


def round_stochastically(out: Tensor, source: Tensor, key: int, first: int = 0) -> None:
    """Round ``source``, fp32 [n], to ``out``, bf16 [n], on any device. Infinities and NaN stay.

    Args:
        key: 64 bits; other keys give other random bits.
        first: index of element 0 in the whole.

    Raises:
        KernelError: tensors of other dtypes, sizes or devices, or a negative ``first``.
    """
    device = source.device.type
    flat("round_stochastically", "source", source, FP32, device=device)
    flat("round_stochastically", "out", out, (torch.bfloat16,), source.numel(), device)
    if first < 0:
        raise KernelError(
            f"round_stochastically: first is {first}; give the index of element 0 in the whole, at "
            "least 0"
        )
    core = native.core() if device == "cpu" else None
    if device == "meta":  # in a simulation: a cast reads and writes as much as the kernel
        out.copy_(source)
    elif core is None:
        ROUND(out, source, key, first)
    else:
        core.round_stochastically(address(out), address(source), source.numel(), key, first)


def round_reference(out: Tensor, source: Tensor, key: int, first: int) -> None:
    """Round as the kernel does, in torch."""
    for at in range(0, source.numel(), PIECE):
        piece = source[at : at + PIECE]
        random = reference.random_bits(key, first + at, piece.numel(), source.device)
        out[at : at + PIECE] = reference.to_bf16(piece, random & 0xFFFF)


def _example(device: torch.device) -> tuple[object, ...]:
    source = torch.linspace(-1, 1, 300, device=device)
    return torch.empty_like(source, dtype=torch.bfloat16), source, 7, 1000


ROUND = Kernel(
    "stochastic_rounding", "stochastic_rounding:round_", round_reference, example=_example
)
