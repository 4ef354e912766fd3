"""Attention over the blocks of a layout, differentiable, on any device; torch.compile sees one
operator.

The operator gets the layout as the number of its configuration; it is compiled once for each
length, device and number of heads.
"""

from __future__ import annotations

import math
import weakref

import torch

from hf_zero.device import graphs
from hf_zero.device.kinds import autocast_dtype
from hf_zero.errors import KernelError
from hf_zero.ops.dispatch import Kernel, version_of

from . import reference
from .layouts import BigBirdSparsityConfig, BlockLayout, SparsityConfig
from .plan import SparsePlan, plan_for

WIDEST_HEAD = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# layouts read from tensors, with the versions of these, by id and block
_READ_LAYOUTS: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], int, BlockLayout]] = {}


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SparsityConfig | torch.Tensor,
    *,
    causal: bool | None = None,
    key_padding_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return softmax(q kᵀ · scale) v over the blocks of ``layout`` only.

    Shapes: q is [B, H, S, D]; k and v are [B, Hkv, S, D], where H is a multiple of Hkv and
    neighboring heads share; D is at most 256. The result is [B, H, S, D], laid out as [B, S, H,
    D]. S need not be a multiple of the block. ``layout`` is a SparsityConfig or a tensor [heads or
    1, blocks, blocks], compiled at its first use (inside torch.compile, and for a tensor that is
    written to later, pass ``BlockLayout(tensor, block)``). ``causal`` None follows the
    configuration: a unidirectional one is causal within its blocks too. ``key_padding_mask`` [B,
    S], bool or 0 and 1: keys that are attended to. ``dropout`` drops probabilities; pass 0 when not
    training. A row without any key gives zeros, where torch's scaled_dot_product_attention gives
    NaN. Raises KernelError.
    """
    if (dtype := autocast_dtype(q.device.type)) is not None:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    _check_inputs(q, k, v, dropout)
    config = layout if isinstance(layout, SparsityConfig) else _layout_in(layout, q.shape[2])
    if causal is None:
        causal = config.attention == "unidirectional"
    padding = None
    if key_padding_mask is not None:
        if key_padding_mask.shape != (q.shape[0], q.shape[2]):
            raise KernelError(
                f"key_padding_mask is {list(key_padding_mask.shape)} and must be [batch, length], "
                f"{[q.shape[0], q.shape[2]]}: "
                "one value for each key; other masks belong into the layout"
            )
        padding = key_padding_mask.to(torch.bool)
    seed = (
        torch.randint(0, 2**31 - 1, (1,), device=q.device, dtype=torch.int64) if dropout else None
    )
    scale = 1 / math.sqrt(q.shape[3] or 1) if scale is None else float(scale)
    o, _ = _attend(q, k, v, padding, seed, config.handle, causal, scale, float(dropout))
    return o


def _check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> None:
    """Raise KernelError for shapes, dtypes and devices that are not those of self-attention."""
    if (
        q.dim() != 4
        or k.shape != v.shape
        or k.dim() != 4
        or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
    ):
        raise KernelError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; self-attention takes "
            "[B, H, S, D] and twice [B, Hkv, S, D]"
        )
    if q.shape[1] % max(1, k.shape[1]) or not k.shape[1]:
        raise KernelError(
            f"{q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys; the first "
            "must be a multiple of the second"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise KernelError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be of one floating dtype"
        )
    if not q.device == k.device == v.device:
        raise KernelError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}; they must be on one device"
        )
    if q.shape[3] > WIDEST_HEAD:
        raise KernelError(
            f"heads are {q.shape[3]} wide; block-sparse attention takes at most {WIDEST_HEAD}"
        )
    if not 0 <= dropout < 1:
        raise KernelError(f"dropout is {dropout}; it must be at least 0 and below 1")


def _layout_in(layout: torch.Tensor, length: int) -> BlockLayout:
    """Return the layout that a tensor holds for ``length`` tokens, read from the device once while
    the tensor is unchanged. Inference tensors do not count writes, so they are read each time.
    """
    if layout.dim() != 3:
        raise KernelError(
            f"a layout has the shape [heads, blocks, blocks], not {list(layout.shape)}"
        )
    blocks = layout.shape[1]
    block = next((size for size in (16, 32, 64, 128, 256, 512) if -(-length // size) == blocks), 0)
    if not block:
        raise KernelError(
            f"a layout of {blocks} blocks fits {length} tokens with no block of 16, "
            "32, 64, 128, 256 or 512"
        )
    version = version_of(layout)
    if version is None:
        return BlockLayout(layout, block)
    key = id(layout), block
    cached = _READ_LAYOUTS.get(key)
    if cached is not None and cached[0]() is layout and cached[1] == version:
        return cached[2]
    block_layout = BlockLayout(layout, block)
    forget = weakref.ref(layout, lambda _: _READ_LAYOUTS.pop(key, None))
    _READ_LAYOUTS[key] = forget, version, block_layout
    return block_layout


def _plan(handle: int, q: torch.Tensor, k: torch.Tensor, causal: bool) -> SparsePlan:
    """Return the plan of the kernels, whose tensors a graph under capture keeps."""
    plan = plan_for(handle, q.shape[2], q.shape[1], q.shape[1] // k.shape[1], causal, q.device)
    for lists in (plan.rows, plan.columns):
        graphs.hold(lists.items, lists.index, lists.bits, lists.splits)
    return plan


def _refusal(q: torch.Tensor) -> str:
    """Return why the Triton kernels do not compute ``q``, or "" if they do."""
    if q.dtype not in _DTYPES:
        return f"it computes in bf16, fp16 and fp32, not in {q.dtype}"
    if q.dtype == torch.float32 and q.shape[3] > 128:
        return "tiles of fp32 with heads above 128 do not fit shared memory"
    return ""


def _example(device: torch.device) -> tuple[object, ...]:
    q, k, v = (torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    handle = BigBirdSparsityConfig(
        2, block=64, num_random_blocks=0, num_sliding_window_blocks=1
    ).handle
    return q, k, v, plan_for(handle, 128, 2, 1, False, device), None, None, False, 0.125, 0.0


def _backward_example(device: torch.device) -> tuple[object, ...]:
    q, k, v, *other_inputs = _example(device)
    assert isinstance(q, torch.Tensor)
    return q, q, k, v, q, torch.zeros(q.shape[:3], device=device), *other_inputs


FORWARD = Kernel(
    "sparse_attention",
    "sparse_attention:forward",
    reference.forward,
    refuses=lambda q, *_: _refusal(q),
    example=_example,
)
BACKWARD = Kernel(
    "sparse_attention_backward",
    "sparse_attention_backward:backward",
    reference.backward,
    refuses=lambda grad, q, *_: _refusal(q),
    example=_backward_example,
)


@torch.library.custom_op("hf_zero::sparse_attention", mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padding: torch.Tensor | None,
    seed: torch.Tensor | None,
    handle: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.numel():
        return _attend_fake(q)
    return FORWARD(q, k, v, _plan(handle, q, k, causal), padding, seed, causal, scale, dropout)


@_attend.register_fake
def _attend_fake(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return reference.empty_like_heads(q), lse


@torch.library.custom_op("hf_zero::sparse_attention_backward", mutates_args=())
def _attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    padding: torch.Tensor | None,
    seed: torch.Tensor | None,
    handle: int,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not q.numel():
        return _attend_backward_fake(grad, q, k, v)
    return BACKWARD(
        grad, q, k, v, o, lse, _plan(handle, q, k, causal), padding, seed, causal, scale, dropout
    )


@_attend_backward.register_fake
def _attend_backward_fake(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (reference.empty_like_heads(x) for x in (q, k, v))
    return dq, dk, dv


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, padding, seed, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, padding, seed)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, o, lse, padding, seed = ctx.saved_tensors
    grads = _attend_backward(grad, q, k, v, o, lse, padding, seed, *ctx.settings)
    return *grads, None, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)
