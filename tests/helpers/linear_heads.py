"""A linear head's loss and log-probabilities, as the engine differentiates their operators, and of
whole logits by torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_zero.ops.chunked_head import rows_of_a_chunk
from hf_zero.ops.deferred.chunks import SummedLoss
from hf_zero.ops.deferred.heads import _LogProbabilities
from hf_zero.ops.deferred.losses import _divided

Tensor = torch.Tensor


def whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, scale: float
) -> Tensor:
    """softcap · tanh(scale · logits / softcap), at least in fp32."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def plain_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    reduction: str = "mean",
    num_items: Tensor | None = None,
) -> Tensor:
    """The loss of whole logits, by autograd; ``num_items`` is what a mean divides by instead of
    the number of labels that count.
    """
    logits = whole_logits(hidden, weight, bias, softcap, scale)
    settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    total = F.cross_entropy(logits, labels, reduction="sum", **settings)
    if reduction == "sum":
        return total
    return total / ((labels != ignore_index).sum() if num_items is None else num_items)


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    reduction: str = "mean",
    num_items: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The same of ``chunk`` rows of logits at a time."""
    terms = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    terms |= {"softcap": softcap, "scale": scale, "reduction": "sum"}
    total: Tensor = SummedLoss.apply(
        lambda hidden, weight, bias: plain_loss(hidden, weight, labels, bias=bias, **terms),
        (ignore_index, label_smoothing, softcap, scale, _rows(chunk, hidden, weight)),
        labels, hidden, weight, bias,
    )  # fmt: skip
    if reduction == "sum":
        return total
    count = (labels != ignore_index).sum() if num_items is None else num_items
    return _divided(total, count)


def chunked_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """The log-probability of each label, 0 of those that are -100."""

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = whole_logits(hidden, weight, bias, softcap, scale)
        return plain_log_probabilities(logits, labels)

    result: Tensor = _LogProbabilities.apply(
        plain, None, (-100, softcap, scale, _rows(chunk, hidden, weight)), labels, True,
        hidden, weight, bias,
    )  # fmt: skip
    return result


def plain_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.where(labels != -100, 0.0)


def _rows(chunk: int | None, hidden: Tensor, weight: Tensor) -> int:
    size = hidden.shape[0], weight.shape[0], hidden.element_size()
    return rows_of_a_chunk(*size, hidden.device) if chunk is None else chunk
