"""Rotary position embedding of queries and keys in one launch.

RoFormer (Su et al., arXiv:2104.09864) in the half rotation of transformers'
``apply_rotary_pos_emb``: ``x * cos + (-second half, first half) * sin``. Computed in fp32 and
rounded once, where transformers rounds three times. Only cos and sin are saved for the backward,
which applies the transpose.

The op writes new tensors. Overwriting q and k would move the same bytes, and autograd would add
copies: they are views of a projection's output, and an in-place change of a view clones the whole
gradient in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import model_reference as reference
from hf_zero.ops.dispatch import FLOATS, Kernel
from hf_zero.ops.operators import GradientContext, operator


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, in their shapes and dtypes; their memory is laid out as [batch,
    sequence, heads, width].

    Args:
        q: [batch, heads, sequence, width], any strides; fp32, bf16 or fp16.
        k: [batch, key heads, sequence, width]; its number of heads may be smaller.
        cos, sin: [batch or 1, sequence, rotary width], an even width that may be smaller than q's:
            the columns beyond are copied. They are constants: they include any attention scaling,
            and they get no gradient.

    Raises:
        KernelError: a dtype, device or shape does not fit, or cos or sin requires a gradient.
    """
    _check(q, k, cos, sin)
    return _rotary(q, k, cos, sin)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in {"q": q, "k": k, "cos": cos, "sin": sin}.items():
        if tensor.dtype not in FLOATS:
            raise KernelError(
                f"rotary: {name} is {tensor.dtype}; give one of {', '.join(map(str, FLOATS))}"
            )
        if tensor.device != q.device:
            raise KernelError(
                f"rotary: {name} is on {tensor.device} and q on {q.device}; move one of them"
            )
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise KernelError(
            f"rotary: q has shape {list(q.shape)} and k {list(k.shape)}; give [batch, heads, "
            "sequence, width], alike but for the heads"
        )
    if q.dtype != k.dtype:
        raise KernelError(f"rotary: q is {q.dtype} and k {k.dtype}; cast one of them")
    batch, _, sequence, width = q.shape
    if (
        cos.shape != sin.shape
        or cos.dim() != 3
        or cos.shape[0] not in (1, batch)
        or cos.shape[1] != sequence
    ):
        raise KernelError(
            f"rotary: cos has shape {list(cos.shape)} and sin {list(sin.shape)}; give both as "
            f"[{batch} or 1, {sequence}, rotary width]"
        )
    if cos.shape[2] % 2 or not 0 < cos.shape[2] <= width:
        raise KernelError(
            f"rotary: the rotary width is {cos.shape[2]}; give an even one, at most {width}"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelError(
            "rotary: cos or sin asks for a gradient, which this op does not give; detach them"
        )


def _example(device: torch.device) -> tuple[object, ...]:
    q, k = torch.ones(1, 4, 3, 16, device=device), torch.ones(1, 2, 3, 16, device=device)
    angle = torch.ones(1, 3, 16, device=device)
    return (q, k, angle, angle, False, torch.empty_like(q), torch.empty_like(k))


ROTARY = Kernel("rotary", "rotary:rotary", reference.rotary, example=_example)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """Launch the kernel, with tensors whose last axis is made contiguous."""
    outs = _heads_like(q), _heads_like(k)
    if q.numel():
        near = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
        ROTARY(*near, backward, *outs)
    return outs


def _heads_like(x: Tensor) -> Tensor:
    """Allocate [batch, heads, sequence, width], laid out as [batch, sequence, heads, width]; no
    view, because models write into results of operators.
    """
    _, heads, sequence, width = x.shape
    strides = (sequence * heads * width, width, heads * width, 1)
    return x.new_empty_strided(x.shape, strides)


@operator("hf_zero::rotary")
def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _run(q, k, cos, sin, False)


@operator("hf_zero::rotary_backward")
def _rotary_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _run(dq, dk, cos, sin, True)


@_rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _heads_like(q), _heads_like(k)


@_rotary_backward.register_fake
def _(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _heads_like(dq), _heads_like(dk)


def _keep_angles(ctx: GradientContext, inputs: tuple[Tensor, ...], output: object) -> None:
    _, _, cos, sin = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_gradient(ctx: GradientContext, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return *_rotary_backward(dq, dk, *ctx.saved_tensors), None, None


_rotary.register_autograd(_rotary_gradient, setup_context=_keep_angles)
