"""Adam and AdamW with both moments in dynamic 8-bit blocks, in one launch a parameter.

The kernel gives the bits of the reference on a CPU. On a GPU the reference, separate operations of
torch, multiplies the gradient by the reciprocal of a ``divisor``: unless that is a power of two,
the gradient may differ there in its last place, and a moment by one code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.ops import reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.moment_blocks import Blocks


def adam_reference(
    master: Tensor,
    grad: Tensor,
    mean: tuple[Tensor, Tensor],
    square: tuple[Tensor, Tensor],
    out: Tensor | None,
    keep: float,
    l2: float,
    beta1: float,
    beta2: float,
    root_scale: float,
    eps: float,
    step_size: float,
    divisor: float,
    negate: bool,
) -> None:
    """Make one step of Adam on ``master``, fp32 [n].

    ``mean`` and ``square``: codes, uint8 [n], and scales, fp32 [ceil(n / 256)]; the rest as in
    :func:`hf_zero.ops.reference.adam`.
    """
    reference.adam(
        master,
        grad,
        Blocks(*mean, signed=True, dynamic=True),
        Blocks(*square, signed=False, dynamic=True),
        None,
        keep=keep,
        l2=l2,
        beta1=beta1,
        beta2=beta2,
        root_scale=root_scale,
        eps=eps,
        step_size=step_size,
        divisor=divisor,
        negate=negate,
        out=out,
    )


def _example(device: torch.device) -> tuple[object, ...]:
    values = torch.linspace(-1, 1, 300, device=device)
    moments = (
        reference.encode_dynamic(values * 0.1, True),
        reference.encode_dynamic(values.square(), False),
    )
    numbers = (0.99, 0.1, 0.9, 0.999, 1.0, 1e-8, 1e-3, 2.0, False)
    return values.clone(), values, *moments, values.bfloat16(), *numbers


EIGHT_BIT_ADAM = Kernel("eight_bit_adam", "eight_bit_adam:adam_", adam_reference, example=_example)
