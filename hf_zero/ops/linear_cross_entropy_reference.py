"""Cross-entropy over rows of logits, and over all of them at once, in plain torch: the reference of
the kernel and of the chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def cross_entropy_(
    logits: torch.Tensor,
    vocabulary: int,
    labels: torch.Tensor,
    factors: torch.Tensor | None,
    lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
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

        loss = lse − (1 − ε) y_l − ε/V Σ y + z lse²
        dloss/dy = softmax(y) (1 + 2 z lse) − (1 − ε) [l] − ε/V

    Returns (losses [rows], lse [rows]), fp32 (fp64 for fp64). A row whose label is ``ignore_index``
    has loss, lse and gradient 0; any other label outside the vocabulary makes its loss NaN.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    x = logits[:, :vocabulary].to(exact) * scale
    y = softcap * torch.tanh(x / softcap) if softcap else x
    kept = labels != ignore_index
    known = (labels >= 0) & (labels < vocabulary)
    at = labels.clamp(0, vocabulary - 1)[:, None]
    # Subtract the largest logit first: its difference to others is exact, but the logsumexp is
    # rounded.
    largest = y.amax(-1) if lse is None else lse.to(exact)
    rest = torch.logsumexp(y - largest[:, None], -1) if lse is None else torch.zeros_like(largest)
    lse = (largest + rest).where(kept, 0.0)
    target = y.gather(1, at)[:, 0]
    loss = (largest - target) + rest + label_smoothing * target + z_loss * lse * lse
    if label_smoothing:
        loss = loss - label_smoothing / vocabulary * y.sum(-1)
    loss = loss.where(known, float("nan")).where(kept, 0.0)
    if factors is not None:
        grad = (
            torch.exp(y - largest[:, None] - rest[:, None]) * (1 + 2 * z_loss * lse[:, None])
            - label_smoothing / vocabulary
        )
        grad.scatter_add_(1, at, (label_smoothing - 1.0) * known[:, None].to(exact))
        if softcap:
            grad *= 1 - (y / softcap) ** 2
        grad *= scale * factors.to(exact).view(-1, 1)
        logits[:, :vocabulary] = grad.where(kept[:, None], 0.0)
    return loss, lse


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute :func:`hf_zero.ops.linear_cross_entropy.linear_cross_entropy` with whole logits and
    by autograd.
    """
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    total = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    kept = labels != ignore_index
    if z_loss:
        total = total + z_loss * (torch.logsumexp(logits, -1) ** 2).where(kept, 0.0).sum()
    if reduction == "sum":
        return total
    return total / (kept.sum() if num_items is None else num_items)
