"""The norms line by line in plain torch, forward and backward: the reference of
kernels/gpu/norms.py, and the fallback without Triton.

Arithmetic is in fp32 (fp64 for fp64) and each result is rounded once. Signatures are those of the
launchers.
"""

from __future__ import annotations

import torch

from hf_zero.ops.philox import kept_rows

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
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
    kept = total.reshape(x.shape).contiguous() if keep_total else total.new_empty(0)
    # A copy if the sum is just x: an operator may not return its own input.
    kept = kept.clone() if kept.data_ptr() == x.data_ptr() and kept.numel() else kept
    return y.to(dtype).reshape(x.shape), kept, mean.float(), rstd.float()


def backward(
    dy: torch.Tensor,
    d_total: torch.Tensor | None,
    saved: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    seed: torch.Tensor | None,
    offset: float,
    dropout: float,
    centered: bool,
    inverted: bool,
    weight_grad: bool,
    tiny: float,
) -> Four:
    """Return the gradients of total, of x under dropout (else empty), of weight and of bias (empty
    unless ``weight_grad``).

    ``saved`` is total, or y if ``inverted``: then ``x_hat = (y - bias) / (offset + weight)``, and 0
    in columns where the divisor's magnitude is below ``tiny``.
    """
    scale = _wide(weight)[0] + offset
    values, incoming, inverse_std = _wide(saved), _wide(dy), rstd.to(_wide(saved).dtype)[:, None]
    if inverted:
        shifted = values - _wide(bias)[0] if bias is not None else values
        normed = shifted * torch.where(scale.abs() >= tiny, 1 / scale, torch.zeros_like(scale))
    else:
        centre = mean.to(values.dtype)[:, None] if centered and mean is not None else 0.0
        normed = (values - centre) * inverse_std
    scaled = incoming * scale
    made = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if centered:
        made = made - scaled.mean(-1, keepdim=True)
    made = made * inverse_std
    if d_total is not None:
        made = made + _wide(d_total)
    dropped = (
        (made * _mask(seed, made, dropout)).to(dy.dtype).reshape(saved.shape)
        if seed is not None
        else dy.new_empty(0)
    )
    d_weight = (incoming * normed).sum(0).to(weight.dtype) if weight_grad else weight.new_empty(0)
    d_bias = (
        incoming.sum(0).to(bias.dtype) if weight_grad and bias is not None else weight.new_empty(0)
    )
    return made.to(dy.dtype).reshape(saved.shape), dropped, d_weight, d_bias


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
