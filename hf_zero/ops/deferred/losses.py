"""Cross-entropy and negative log-likelihood of deferred logits.

Gradients of a plain sum or mean are computed in the forward (``SummedLoss``); those of weighted or
unreduced losses, and of programs that :func:`affine` does not know, by recomputed chunks. On a CPU
rows whose label is ignored are dropped before anything is computed; on other devices they are
dropped where row-wise modules before the decoder are deferred with it.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from hf_zero.device import kinds
from hf_zero.ops import chunked_head
from hf_zero.ops.deferred import programs
from hf_zero.ops.deferred.chunks import SummedLoss
from hf_zero.ops.deferred.programs import Affine, Autocast, affine
from hf_zero.ops.deferred.tensor import HANDLERS, DeferredOutput, plain_rows
from hf_zero.ops.masked_rows import RowCapacity, RowCount, select_rows

_ARGUMENTS = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
    "label_smoothing",
)  # fmt: skip


def _loss(function: Any, args: Any, kwargs: Any) -> Any:
    """Handle cross_entropy, and nll_loss of log_softmax, with classes as targets."""
    given = dict(zip(_ARGUMENTS, args)) | kwargs
    one, target, weight = given.get("input"), given.get("target"), given.get("weight")
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    smoothing = given.get("label_smoothing", 0.0)
    if not isinstance(one, DeferredOutput) or isinstance(target, DeferredOutput):
        return NotImplemented
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NotImplemented
    if one.dim() > 2 or target.dtype != torch.int64 or target.shape != one.shape[:-1]:
        return NotImplemented
    if target.device != one.device or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if not 0 <= smoothing <= 1 or not _labels_fit(target, one.shape[-1], ignored):
        return NotImplemented  # torch's own error
    if weight is not None and (weight.device != one.device or weight.shape != one.shape[-1:]):
        return NotImplemented
    labels = target.reshape(-1)
    if function is F.cross_entropy and weight is None and reduction != "none":
        known = affine(one.program, one._records)
        if known is not None and known.call.call.tensors[0].dtype in _DTYPES:
            loss = _summed(one, known, labels, ignored, smoothing, reduction)
            return one.used(loss, function, args, kwargs)

    more = {"label_smoothing": smoothing} if function is F.cross_entropy else {}

    def losses(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return function(rows, at[:, 0], weight, ignore_index=ignored, reduction="none", **more)

    kept = _kept_rows(labels, ignored)
    source = one.reshape(-1, one.shape[-1]) if one.dim() != 2 else one
    if kept is not None and reduction != "none":
        rows, at = source[kept], labels[kept]
    else:
        rows, at = source, labels
    each = rows.reduced(losses, at[:, None])
    if reduction == "none":
        return one.used(each.reshape(target.shape), function, args, kwargs)
    total = each.sum()
    if reduction == "mean":
        counts = (at != ignored).to(each.dtype)
        if weight is not None:
            counts = counts * weight[at.clamp(min=0)].to(each.dtype)
        total = _divided(total, counts.sum())
    return one.used(total, function, args, kwargs)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _labels_fit(labels: torch.Tensor, words: int, ignored: int) -> bool:
    """Whether labels on a host are classes; a device reports others itself."""
    if labels.device.type != "cpu" or not labels.numel():
        return True
    return not bool((((labels < 0) | (labels >= words)) & (labels != ignored)).any())


def _kept_rows(labels: torch.Tensor, ignored: int) -> torch.Tensor | None:
    """Return the places of labels that count, on a host; None if all do, or on a device, where
    their number is not known.
    """
    if not kinds.is_host(labels.device):
        return None
    kept = (labels != ignored).nonzero()[:, 0]
    return None if kept.numel() == labels.numel() else kept


def _divided(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return total / count; of no label NaN, but with gradients of 0, as in torch."""
    inverse = count.to(total.dtype).reciprocal()
    return total * inverse.nan_to_num(posinf=0.0) + inverse * 0.0


def _summed(
    one: Any, known: Affine, labels: torch.Tensor, ignored: int, smoothing: float, reduction: str
) -> torch.Tensor:
    """Return the sum or the mean of the losses, by the operator of the linear head."""
    call = known.call.call
    inputs = known.call.input
    counted = labels
    dtype = _dtype_of_loss(one)

    def body(_: Any, rows: list[torch.Tensor], shared: list[torch.Tensor]) -> torch.Tensor:
        hidden, weight = rows[0], shared[0]
        bias = shared[1] if len(call.tensors) > 1 else None
        if known.bias is not None:
            bias = known.bias.to(hidden.dtype) if bias is None else bias + known.bias.to(bias.dtype)

        def whole(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            value = F.linear(h, w, b) * known.scale
            if known.softcap is not None:
                value = known.softcap * torch.tanh(value / known.softcap)
            return F.cross_entropy(
                value.to(chunked_head.accumulator_dtype(value.dtype)), counted,
                ignore_index=ignored, reduction="sum", label_smoothing=smoothing,
            )  # fmt: skip

        size = chunked_head.rows_of_a_chunk(
            max(1, hidden.shape[0]), weight.shape[0], hidden.element_size(), hidden.device
        )
        numbers = (ignored, smoothing, 0.0, known.softcap or 0.0, known.scale, size)
        with replace(Autocast.now(hidden.device), enabled=False).active():
            total: torch.Tensor = SummedLoss.apply(whole, numbers, counted, hidden, weight, bias)
        return total

    with torch.set_grad_enabled(torch.is_grad_enabled() and one._records):
        rows, call_node = plain_rows, known.call
        if isinstance(inputs, DeferredOutput) and inputs.is_live():
            flat = inputs.reshape(-1, inputs.shape[-1])
            hidden, counted = _labelled(flat, labels, ignored, call)
            call_node = programs.CallNode(call, hidden)
        total = programs.run(call_node, body, rows)
    if reduction == "mean":
        total = _divided(total, (labels != ignored).sum())
    return total.to(dtype)


def _labelled(
    flat: Any, labels: torch.Tensor, ignored: int, call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the rows of ``flat``, a deferred tensor, whose label counts, and their
    labels.
    """
    kept = _kept_rows(labels, ignored)
    if kept is not None:
        return flat.rows(lambda rows: rows[kept]), labels[kept]
    if kinds.is_host(labels.device):
        return flat.value(), labels
    capacity = _CAPACITIES.setdefault(call.module, RowCapacity())
    known, count = _COUNTS.pop(call.module, (None, None))
    if count is None or known != _identity(labels, ignored):
        count = RowCount(labels, ignored)
    places = capacity.places(count, labels.device)
    if places >= labels.numel():
        return flat.value(), labels
    found: list[torch.Tensor] = []

    def select(rows: torch.Tensor) -> torch.Tensor:
        chosen, at, _ = select_rows(rows, labels, ignore_index=ignored, capacity=places)
        found.append(at)
        return chosen

    return flat.rows(select), found[0]


def count_early(head: Any, labels: torch.Tensor, ignored: int = -100) -> None:
    """Begin to count the ``labels`` that count, on a device, before the model is launched: the loss
    of the module ``head`` then waits for this number alone (``masked_rows.py``, the note).
    """
    if not kinds.is_host(labels.device):
        _COUNTS[head] = _identity(labels, ignored), RowCount(labels, ignored)


def _identity(labels: torch.Tensor, ignored: int) -> tuple[int, ...]:
    return labels.data_ptr(), labels.numel(), labels._version, ignored


_COUNTS: weakref.WeakKeyDictionary[Any, tuple[Any, RowCount]] = weakref.WeakKeyDictionary()
_CAPACITIES: weakref.WeakKeyDictionary[Any, RowCapacity] = weakref.WeakKeyDictionary()


def _dtype_of_loss(one: torch.Tensor) -> torch.dtype:
    """Return the dtype of torch's own loss, which autocast may widen."""
    if one.dtype not in (torch.bfloat16, torch.float16):
        return one.dtype
    sample = torch.zeros(1, 2, dtype=one.dtype, device=one.device)
    zero = torch.zeros(1, dtype=torch.int64, device=one.device)
    return F.cross_entropy(sample, zero, reduction="sum").dtype


HANDLERS.update(dict.fromkeys((F.cross_entropy, F.nll_loss), _loss))
