"""Slow references of the kernels inside a model, in plain torch: norms, activations, dropout and
residual, rotary embedding, cross-entropy. They compute in fp32 and round once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_zero.ops.philox import kept_rows

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    eps: float,
    offset: float,
    dropout: float,
    centered: bool,
    keep_total: bool,
) -> Four:
    """Compute ``y = norm(total) * (offset + weight) + bias`` with ``total = dropout(x) +
    residual``.

    Returns y and total (empty unless ``keep_total``) in the dtype that ``x + residual`` has, and
    mean (empty unless ``centered``) and ``rstd = 1 / sqrt(variance + eps)`` of each row in fp32.
    """
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    total = _wide(x)
    if seed is not None:
        total = total * _mask(seed, total, dropout)
    if residual is not None:
        total = total + _wide(residual)
    total = total.to(dtype)  # the norm is taken of the rounded sum
    values = _wide(total)
    mean = values.mean(-1) if centered else values.new_empty(0)
    if centered:
        values = values - mean[:, None]
    rstd = torch.rsqrt(values.square().mean(-1) + eps)
    y = values * rstd[:, None] * (_wide(weight)[0] + offset)
    if bias is not None:
        y = y + _wide(bias)[0]
    saved_total = _like(x, total) if keep_total else total.new_empty(0)
    return _like(x, y.to(dtype)), saved_total, mean.float(), rstd.float()


def _like(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy ``rows`` to the shape of ``x``: models write into results of operators, and autograd
    refuses that for views and for inputs.
    """
    out = rows.new_empty(x.shape)
    out.view(rows.shape).copy_(rows)
    return out


def norm_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    offset: float,
    dropout: float,
    centered: bool,
    weight_grad: bool,
) -> Four:
    """Return the gradients of total, which is ``saved``, of x under dropout (else empty), of weight
    and of bias (empty unless ``weight_grad``).
    """
    scale = _wide(weight)[0] + offset
    values, incoming, inverse_std = _wide(saved), _wide(dy), rstd.to(_wide(saved).dtype)[:, None]
    centre = mean.to(values.dtype)[:, None] if centered and mean is not None else 0.0
    normed = (values - centre) * inverse_std
    scaled = incoming * scale
    dx = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if centered:
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * inverse_std
    dropped = dy.new_empty(0)
    if seed is not None:
        dropped = (dx * _mask(seed, dx, dropout)).to(dy.dtype).reshape(saved.shape)
    d_weight = (incoming * normed).sum(0).to(weight.dtype) if weight_grad else weight.new_empty(0)
    d_bias = (
        incoming.sum(0).to(bias.dtype) if weight_grad and bias is not None else weight.new_empty(0)
    )
    return dx.to(dy.dtype).reshape(saved.shape), dropped, d_weight, d_bias


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as contiguous rows [rows, width] in the dtype of the arithmetic."""
    return (
        x.reshape(x.shape[:-1].numel(), x.shape[-1])
        .to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        .contiguous()
    )


def _mask(seed: torch.Tensor, rows: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return 0 or 1 / (1 - p) for each element of ``rows``."""
    return kept_rows(seed, rows.shape[0], rows.shape[1], dropout).to(rows.dtype) / (1 - dropout)


_SLOPE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def activate(x: Tensor, act: str) -> Tensor:
    """Return ``act`` of fp32 ``x``."""
    if act == "silu":
        return x * torch.sigmoid(x)
    if act == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(_SLOPE * (x + _CUBIC * x * x * x)))
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def derivative(x: Tensor, act: str) -> Tensor:
    """Return the derivative of ``act`` at fp32 ``x``."""
    if act == "silu":
        sigmoid = torch.sigmoid(x)
        return sigmoid * (1 + x * (1 - sigmoid))
    if act == "gelu_tanh":
        tanh = torch.tanh(_SLOPE * (x + _CUBIC * x * x * x))
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _SLOPE * (1 + 3 * _CUBIC * x * x)
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(
        2 * math.pi
    )


def bias_act(x: Tensor, bias: Tensor | None, act: str, out: Tensor) -> None:
    """Compute ``out = act(x + bias)``; x, out [rows, width], bias [width]."""
    out.copy_(activate(_sum(x, bias), act))


def bias_act_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str, dx: Tensor, dbias: Tensor | None
) -> None:
    """Compute ``dx = dy * act'(x + bias)`` and ``dbias``, its sum over the rows."""
    grad = dy.float() * derivative(_sum(x, bias), act)
    dx.copy_(grad)
    if dbias is not None:
        dbias.copy_(grad.sum(0))


def gated(gate: Tensor, up: Tensor, act: str, out: Tensor) -> None:
    """Compute ``out = act(gate) * up``; all [rows, width]."""
    out.copy_(activate(gate.float(), act) * up.float())


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, act: str, dgate: Tensor, dup: Tensor
) -> None:
    """Compute ``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``."""
    wide, grad = gate.float(), dy.float()
    dgate.copy_(grad * up.float() * derivative(wide, act))
    dup.copy_(grad * activate(wide, act))


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()


def dropout_add(x: Tensor, residual: Tensor, seed: Tensor, dropout: float, out: Tensor) -> None:
    """Compute ``out = residual + dropout(x)``; x, residual, out [rows, width], seed int64 [1]."""
    out.copy_(residual.float() + dropped(x.float(), seed, dropout))


def dropout_add_backward(dy: Tensor, seed: Tensor, dropout: float, dx: Tensor) -> None:
    """Compute ``dx = dropout(dy)`` with the mask of the forward."""
    dx.copy_(dropped(dy.float(), seed, dropout))


def dropped(values: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Return each fp32 element scaled by 1/(1-p) if kept, else zero."""
    rows, width = values.shape
    kept_mask = kept_rows(seed, rows, width, dropout)
    return values.mul(1 / (1 - dropout) if dropout < 1 else 0.0).masked_fill(~kept_mask, 0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool, out: Tensor) -> None:
    """Rotate one tensor [batch, heads, sequence, width] by cos, sin [batch or 1, sequence, rotary
    width]; columns beyond are copied.

    ``backward`` applies the transpose, which for cos and sin of equal halves is the rotation by the
    negative angle.
    """
    rotated = cos.shape[-1]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    wide = x[..., :rotated].float()
    turned = turn(wide * sin, True) if backward else turn(wide, False) * sin
    out[..., :rotated] = wide * cos + turned
    out[..., rotated:] = x[..., rotated:]


def turn(x: Tensor, backward: bool) -> Tensor:
    """Return (-second half, first half), or its transpose."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first) if backward else (-second, first), dim=-1)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool, q_out: Tensor, k_out: Tensor
) -> None:
    """Rotate q and k into q_out and k_out: [batch, heads, sequence, width], each with its own
    number of heads.
    """
    rotate(q, cos, sin, backward, q_out)
    rotate(k, cos, sin, backward, k_out)


def cross_entropy_(
    logits: torch.Tensor,
    vocabulary: int,
    labels: torch.Tensor,
    factors: torch.Tensor | None,
    lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and logsumexps of rows of raw logits; write the losses' gradient over the
    logits.

    ``logits`` [rows, width ≥ vocabulary]: columns from ``vocabulary`` on are padding and never
    read. With ``factors`` ([1] or [rows], fp32) the gradient of each row's loss times its factor
    replaces the logits; without, they stay. ``lse`` is the logsumexp if already known. With y =
    softcap · tanh(scale · x / softcap), or scale · x if softcap is 0, V the vocabulary, l the
    label::

        loss = lse − (1 − ε) y_l − ε/V Σ y
        dloss/dy = softmax(y) − (1 − ε) [l] − ε/V

    Returns (losses [rows], lse [rows]), fp32 (fp64 for fp64). A row whose label is ``ignore_index``
    has loss, lse and gradient 0; any other label outside the vocabulary makes its loss NaN.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    x = logits[:, :vocabulary].to(exact) * scale
    y = softcap * torch.tanh(x / softcap) if softcap else x
    labeled = labels != ignore_index
    in_vocabulary = (labels >= 0) & (labels < vocabulary)
    at = labels.clamp(0, vocabulary - 1)[:, None]
    # Subtract the largest logit first: its difference to others is exact, but the logsumexp is
    # rounded.
    largest = y.amax(-1) if lse is None else lse.to(exact)
    tail = torch.logsumexp(y - largest[:, None], -1) if lse is None else torch.zeros_like(largest)
    lse = (largest + tail).where(labeled, 0.0)
    target = y.gather(1, at)[:, 0]
    loss = (largest - target) + tail
    if label_smoothing:
        loss = loss + label_smoothing * (target - y.sum(-1) / vocabulary)
    loss = loss.where(in_vocabulary, float("nan")).where(labeled, 0.0)
    if factors is not None:
        grad = torch.exp(y - largest[:, None] - tail[:, None]) - label_smoothing / vocabulary
        grad.scatter_add_(1, at, (label_smoothing - 1.0) * in_vocabulary[:, None].to(exact))
        if softcap:
            grad *= 1 - (y / softcap) ** 2
        grad *= scale * factors.to(exact).view(-1, 1)
        logits[:, :vocabulary] = grad.where(labeled[:, None], 0.0)
    return loss, lse
