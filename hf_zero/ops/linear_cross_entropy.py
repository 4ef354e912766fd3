"""Operators of a linear head that never hold the logits [tokens, vocabulary] as a whole: the summed
cross-entropy with its gradients, log-probabilities of labels and their gradients.

The cross-entropy's gradients are computed in the forward, while the logits of a chunk exist: three
GEMMs instead of four, at the price of a gradient of the weight that lives from forward to backward
(``deferred.chunks.SummedLoss``). Log-probabilities, whose gradient depends on later operations,
recompute the logits instead (``deferred.heads``). Soft-capping is that of Gemma 2 (2024, section
2), label smoothing that of Szegedy et al. 2016 (section 7), as in
torch.nn.functional.cross_entropy. The operators check nothing and have no derivative of their own.
"""

from __future__ import annotations

import torch

from hf_zero.ops import chunked_head
from hf_zero.ops.chunked_head import Terms, Wanted, accumulator_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.library.custom_op("hf_zero::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    scale: float,
    rows: int,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the losses, and its gradients for hidden, weight and bias in accumulation
    precision; empty if not asked for.
    """
    terms = Terms(ignore_index, label_smoothing, softcap, scale)
    wanted = Wanted(for_hidden, for_weight, for_bias)
    with torch.autocast(hidden.device.type, enabled=False):  # the operands have been cast
        total, grads = chunked_head.losses_and_gradients(
            hidden.contiguous(), weight.detach(), bias, labels.contiguous(), terms, wanted, rows
        )
    return total, *grads.finish()


@_forward.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, *settings: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, for_hidden, for_weight, for_bias = settings
    dtype = accumulator_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(hidden.shape if for_hidden else 0, dtype=dtype),
        hidden.new_empty(weight.shape if for_weight else 0, dtype=dtype),
        hidden.new_empty(weight.shape[0] if for_bias else 0, dtype=dtype),
    )


@torch.library.custom_op("hf_zero::linear_log_probs", mutates_args=())
def _log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the labels and the logsumexps, [tokens] each."""
    terms = Terms(ignore_index, softcap=softcap, scale=scale)
    with torch.autocast(hidden.device.type, enabled=False):
        return chunked_head.log_probabilities(
            hidden.contiguous(), weight.detach(), bias, labels.contiguous(), terms, rows
        )


@_log_probs.register_fake
def _(hidden: torch.Tensor, *_settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = hidden.new_empty(hidden.shape[0], dtype=accumulator_dtype(hidden.dtype))
    return log_probs, torch.empty_like(log_probs)


@torch.library.custom_op("hf_zero::linear_log_probs_backward", mutates_args=())
def _log_probs_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    rows: int,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients for hidden, weight and bias in their dtype; empty if not asked for."""
    terms = Terms(ignore_index, softcap=softcap, scale=scale)
    wanted = Wanted(for_hidden, for_weight, for_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        grads = chunked_head.log_probabilities_backward(
            grad.contiguous(),
            hidden.contiguous(),
            weight.detach(),
            bias,
            labels.contiguous(),
            lse,
            terms,
            wanted,
            rows,
        )
    dtype = hidden.dtype
    first, second, third = (
        gradient if gradient.dtype == dtype else gradient.to(dtype) for gradient in grads.finish()
    )
    return first, second, third


@_log_probs_backward.register_fake
def _(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *settings: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *_, for_hidden, for_weight, for_bias = settings
    return (
        hidden.new_empty(hidden.shape if for_hidden else 0),
        hidden.new_empty(weight.shape if for_weight else 0),
        hidden.new_empty(weight.shape[0] if for_bias else 0),
    )
