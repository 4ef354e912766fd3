"""Results of a linear head by operators that hold the logits of a chunk: log-probabilities of
labels, logsumexps, and the places of the largest logits.

[Note: a vocabulary in parts]
Each tensor-parallel rank computes the logsumexp over its part of the vocabulary, and the rank whose
part has the label its log-probability in that part. One all-gather of three numbers a token makes
the results of the whole vocabulary. The gradient of a part's logits needs that logsumexp alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from hf_zero.ops import chunked_head
from hf_zero.ops.deferred import programs
from hf_zero.ops.deferred.chunks import is_out_of_place, recorded
from hf_zero.ops.deferred.programs import Affine, Autocast, CallNode, VocabularyAxis
from hf_zero.ops.deferred.tensor import plain_rows
from hf_zero.ops.linear_cross_entropy import DTYPES
from hf_zero.ops.operators import GradientContext

IGNORED = -100  # label of the operators for a row without one, in parts of a vocabulary

Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]


def head_of(node: programs.Node, records: bool) -> Affine | None:
    """Return ``node`` as the output of a linear head that the operators can compute, or None."""
    form = programs.affine(node, records)
    return form if form is not None and form.call.call.tensors[0].dtype in DTYPES else None


def head_in_log_softmax(node: programs.Node, records: bool) -> Affine | None:
    """Return the head of which ``node`` is the log_softmax, or None."""
    if not isinstance(node, programs.Step) or node.function is not programs.log_softmax:
        return None
    form, dtype = head_of(node.inputs[0], records), node.inputs[1]
    wide = None if form is None else chunked_head.accumulator_dtype(form.call.call.tensors[0].dtype)
    return form if dtype in (None, wide) else None


def on_head(form: Affine, node: CallNode, body: Body) -> torch.Tensor:
    """Return ``body(hidden, weight, bias, size)`` inside the call of the head; ``hidden`` [n, in]:
    the rows of ``node``, ``size``: the rows of a chunk.
    """
    call = form.call.call

    def inside(_: object, rows: list[torch.Tensor], shared: list[torch.Tensor]) -> torch.Tensor:
        hidden, weight = rows[0], shared[0]
        bias = shared[1] if len(call.tensors) > 1 else None
        if form.bias is not None:
            bias = form.bias.to(hidden.dtype) if bias is None else bias + form.bias.to(bias.dtype)
        size = chunked_head.rows_of_a_chunk(
            max(1, hidden.shape[0]), weight.shape[0], hidden.element_size(), hidden.device
        )
        with replace(Autocast.now(hidden.device), enabled=False).active():
            return body(hidden, weight, bias, size)

    return programs.run(node, inside, plain_rows)


def whole_logits(
    form: Affine, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits of all rows, for a second derivative."""
    value = form.call.call.joined(F.linear(hidden, weight, bias)) * form.scale
    if form.softcap is not None:
        value = form.softcap * torch.tanh(value / form.softcap)
    return value.to(chunked_head.accumulator_dtype(value.dtype))


def log_probabilities(form: Affine, labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Return the log-probabilities [n] of ``labels`` [n], at least in fp32; 0 of ``ignored``."""

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        at = labels.where(labels != ignored, 0)[:, None]
        values = whole_logits(form, *tensors).log_softmax(-1).gather(-1, at)[:, 0]
        return values.where(labels != ignored, 0.0)

    def body(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        axis, number, at = form.call.call.axis, ignored, labels
        if axis is not None:  # labels of other parts are outside the vocabulary of this one
            width = weight.shape[0]
            local_labels = labels - axis.rank * width
            local_labels = local_labels.where((local_labels >= 0) & (local_labels < width), width)
            number, at = IGNORED, local_labels.where(labels != ignored, IGNORED)
        numbers = (number, form.softcap or 0.0, form.scale, size)
        log_probs: torch.Tensor = _LogProbabilities.apply(
            plain, axis, numbers, at, True, hidden, weight, bias
        )
        return log_probs

    return on_head(form, form.call, body)


def logsumexps(form: Affine) -> torch.Tensor:
    """Return the logsumexps [n], at least in fp32."""

    def body(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        none = torch.full((hidden.shape[0],), weight.shape[0], device=hidden.device)
        numbers = (IGNORED, form.softcap or 0.0, form.scale, size)
        lse: torch.Tensor = _LogProbabilities.apply(
            lambda *tensors: whole_logits(form, *tensors).logsumexp(-1),
            form.call.call.axis,
            numbers,
            none,
            False,
            hidden,
            weight,
            bias,
        )
        return lse

    return on_head(form, form.call, body)


def places_of_largest(form: Affine, axis: VocabularyAxis) -> torch.Tensor:
    """Return the places [n] of the largest logits of a vocabulary in parts."""

    def body(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        parts = [F.linear(rows, weight, bias).max(-1) for rows in hidden.split(size)]
        values, places = (torch.cat([part[at] for part in parts]).double() for at in (0, 1))
        pairs = torch.stack([values, places + axis.rank * weight.shape[0]], -1)
        joined = axis.join(pairs, "largest logits").view(-1, axis.size, 2)
        first = joined[..., 0].argmax(-1, keepdim=True)
        return joined[..., 1].gather(-1, first)[:, 0].long()

    with torch.no_grad():
        return on_head(form, form.call, body)


class _LogProbabilities(torch.autograd.Function):
    """Log-probabilities of labels, or logsumexps, whose backward computes the logits again.

    ``plain(hidden, weight, bias)`` is the same with whole logits, for a second derivative.
    """

    @staticmethod
    def forward(
        ctx: GradientContext,
        plain: Callable[..., torch.Tensor],
        axis: VocabularyAxis | None,
        numbers: tuple[object, ...],
        labels: torch.Tensor,
        labeled: bool,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        log_probs, lse = torch.ops.hf_zero.linear_log_probs(
            hidden, weight.detach(), bias, labels, *numbers
        )
        if axis is not None:
            log_probs, lse = _joined(axis, log_probs, lse, labels, weight.shape[0])
        ctx.plain, ctx.numbers, ctx.labeled = plain, numbers, labeled
        ctx.save_for_backward(hidden, weight, bias, labels, lse)
        return log_probs if labeled else lse.clone()

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[5:]
        *tensors, labels, lse = ctx.saved_tensors
        if is_out_of_place(grad):
            return *[None] * 5, *recorded(ctx.plain, tensors, needs, grad)
        grads = torch.ops.hf_zero.linear_log_probs_backward(
            grad if ctx.labeled else -grad, *tensors, labels, lse, *ctx.numbers, *needs
        )
        return *[None] * 5, *(grad if one else None for grad, one in zip(grads, needs))


def _joined(
    axis: VocabularyAxis,
    log_probs: torch.Tensor,
    lse: torch.Tensor,
    labels: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and logsumexps over the vocabularies of all ranks."""
    is_local = (labels >= 0) & (labels < width)
    parts = torch.stack([lse, log_probs.where(is_local, 0.0), is_local.to(lse.dtype)], -1)
    sums, chosen, owned = axis.join(parts, "logsumexps").view(-1, axis.size, 3).unbind(-1)
    lse = sums.logsumexp(-1)
    owned = owned.bool()  # a factor of 0 would make NaN of a part that -inf masks
    log_probs = (chosen + (sums - lse[:, None])).where(owned, 0.0).sum(-1)
    in_vocabulary = owned.any(-1) | (labels == IGNORED)
    return log_probs.where(in_vocabulary, float("nan")), lse
