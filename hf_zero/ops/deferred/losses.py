"""Cross-entropy and negative log-likelihood of deferred logits.

Gradients of a plain sum or mean are computed in the forward (``SummedLoss``); those of weighted or
unreduced losses, and of programs that :func:`affine` does not know, by recomputed chunks. On a CPU
rows whose label is ignored are dropped before anything is computed; on other devices they are
dropped where row-wise modules before the decoder are deferred with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.nn import functional as F

from hf_zero.device import graphs, kinds
from hf_zero.ops.chunked_head import accumulator_dtype
from hf_zero.ops.deferred import heads, programs
from hf_zero.ops.deferred.chunks import SummedLoss
from hf_zero.ops.deferred.programs import Affine, RowwiseCall
from hf_zero.ops.deferred.tensor import HANDLERS, DeferredOutput
from hf_zero.ops.dispatch import version_of
from hf_zero.ops.masked_rows import RowCapacity, RowCount, select_rows

_ARGUMENTS = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)


@dataclass(frozen=True)
class _LossCall:
    """The arguments of a loss with classes as targets."""

    logits: DeferredOutput
    target: torch.Tensor
    weight: torch.Tensor | None
    ignored: int
    smoothing: float
    reduction: str

    def weights_of(self, labels: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each of ``labels``, any for ignored ones; None without weights."""
        if self.weight is None:
            return None
        return self.weight[labels.where(labels != self.ignored, 0)]


def _read(args: Any, kwargs: Any) -> _LossCall | None:
    """Return the call with these arguments; None if torch has to compute it, or to refuse it."""
    arguments = dict(zip(_ARGUMENTS, args)) | kwargs
    logits, target, weight = map(arguments.get, ("input", "target", "weight"))
    reduction, ignored = arguments.get("reduction", "mean"), arguments.get("ignore_index", -100)
    smoothing = arguments.get("label_smoothing", 0.0)
    if not isinstance(logits, DeferredOutput) or not _is_plain(target):
        return None
    if not isinstance(ignored, int) or not isinstance(smoothing, int | float):
        return None
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return None
    if logits.dim() > 2 or target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        return None
    if target.device != logits.device or reduction not in ("mean", "sum", "none"):
        return None
    if not 0 <= smoothing <= 1 or not _labels_fit(target, logits.shape[-1], ignored):
        return None
    if weight is not None:
        if not _is_plain(weight):
            return None
        if weight.device != logits.device or weight.shape != logits.shape[-1:]:
            return None
        weight = weight.clone()  # a write to it before the backward must not be seen
    return _LossCall(logits, target, weight, ignored, smoothing, reduction)


def _loss(function: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Handle cross_entropy, and nll_loss of log_softmax, with classes as targets."""
    call = _read(args, kwargs)
    if call is None:
        return NotImplemented
    logits, labels = call.logits, call.target.reshape(-1)
    find = heads.head_of if function is F.cross_entropy else heads.head_in_log_softmax
    form = find(logits.program, logits.records)
    plain = call.weight is None and call.reduction != "none"
    if form is not None and plain and form.call.call.axis is None:
        return logits.used(_summed(call, form, labels), function, args, kwargs)
    rows: Any = logits.reshape(-1, logits.shape[-1]) if logits.dim() != 2 else logits
    labeled = _kept_rows(labels, call.ignored) if call.reduction != "none" else None
    if labeled is not None:
        rows, labels = rows[labeled], labels[labeled]
    row_losses = _row_losses(function, call, rows, labels, find(rows.program, logits.records))
    dtype = _dtype_of_loss(logits)
    if call.reduction == "none":
        loss = row_losses.to(dtype).reshape(call.target.shape)
    else:
        loss = _reduced(row_losses, call, labels).to(dtype)
    return logits.used(loss, function, args, kwargs)


def _row_losses(
    function: Callable[..., torch.Tensor],
    call: _LossCall,
    rows: DeferredOutput,
    labels: torch.Tensor,
    form: Affine | None,
) -> torch.Tensor:
    """Return the loss of each of ``rows``: by the operator of the head ``form``, else in chunks."""
    if form is not None and not call.smoothing:
        with call.logits.recording():
            row_losses = -heads.log_probabilities(form, labels, call.ignored)
            weights = call.weights_of(labels)
            return row_losses if weights is None else row_losses * weights
    options: dict[str, Any] = {"ignore_index": call.ignored, "reduction": "none"}
    if function is F.cross_entropy:
        options["label_smoothing"] = call.smoothing
    weight = call.weight  # a closure over the call would keep the logits alive

    def losses(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return function(rows, at[:, 0], weight, **options)

    return rows.reduced(losses, labels[:, None])


def _reduced(row_losses: torch.Tensor, call: _LossCall, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum or the weighted mean of the losses of ``labels``."""
    # sums in 16 bits overflow
    total = row_losses.sum(dtype=accumulator_dtype(row_losses.dtype))
    if call.reduction == "sum":
        return total
    counts, weights = (labels != call.ignored).to(total.dtype), call.weights_of(labels)
    if weights is not None:
        counts = counts * weights.to(total.dtype)
    # of no weight NaN, with torch's gradients: NaN of labeled rows, 0 of ignored ones
    inverse = counts.sum().reciprocal()
    return total * inverse + inverse * 0.0


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not isinstance(value, DeferredOutput)


def _labels_fit(labels: torch.Tensor, words: int, ignored: int) -> bool:
    """Return whether labels on a host are classes; a device reports others itself."""
    if labels.device.type != "cpu" or not labels.numel():
        return True
    return not bool((((labels < 0) | (labels >= words)) & (labels != ignored)).any())


def _kept_rows(labels: torch.Tensor, ignored: int) -> torch.Tensor | None:
    """Return the places of labels that count, on a host; None if all do, or on a device, where
    their number is not known.
    """
    if not kinds.is_synchronous(labels.device):
        return None
    labeled = (labels != ignored).nonzero()[:, 0]
    return None if labeled.numel() == labels.numel() else labeled


def _divided(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return total / count; of no label NaN, but with gradients of 0, as in torch."""
    inverse = count.to(total.dtype).reciprocal()
    return total * inverse.nan_to_num(posinf=0.0) + inverse * 0.0


def _summed(call: _LossCall, form: Affine, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum or the mean of the losses, by the operator of the linear head."""
    inputs, head, counted = form.call.rows, form.call.call, labels
    # a closure over the call would keep the logits alive
    ignored, smoothing = call.ignored, call.smoothing

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            heads.whole_logits(form, *tensors),
            counted,
            ignore_index=ignored,
            reduction="sum",
            label_smoothing=smoothing,
        )

    def body(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        numbers = (ignored, smoothing, form.softcap or 0.0, form.scale, size)
        if not torch.is_grad_enabled():  # the forward computes the gradients of what requires them
            hidden, weight = hidden.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        total: torch.Tensor = SummedLoss.apply(whole, numbers, counted, hidden, weight, bias)
        return total

    with call.logits.recording():
        call_node = form.call
        if isinstance(inputs, DeferredOutput) and inputs.is_live():
            flat = inputs.reshape(-1, inputs.shape[-1])
            hidden, counted = _labeled(flat, labels, ignored, head)
            call_node = programs.CallNode(hidden, head)
        total = heads.on_head(form, call_node, body)
    if call.reduction == "mean":
        total = _divided(total, (labels != ignored).sum())
    return total.to(_dtype_of_loss(call.logits))


def _labeled(
    flat: Any, labels: torch.Tensor, ignored: int, head: RowwiseCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and labels of the rows of ``flat``, a deferred tensor, that count."""
    labeled = _kept_rows(labels, ignored)
    if labeled is not None:
        return flat.rows(lambda rows: rows[labeled]), labels[labeled]
    # a host that reads the count would wait, or not be in the graph
    if kinds.is_synchronous(labels.device) or graphs.arguments() is not None:
        return flat.value(), labels
    capacity = _CAPACITIES.setdefault(head.module, RowCapacity())
    early = _COUNTS.pop(head.module, None)
    if early is not None and early.is_of(labels, ignored):
        count = early.count
    else:
        count = RowCount(labels, ignored)
    places = capacity.places(count)
    if places >= labels.numel():
        return flat.value(), labels
    selected: list[torch.Tensor] = []

    def select(rows: torch.Tensor) -> torch.Tensor:
        chosen, at, _ = select_rows(rows, labels, ignore_index=ignored, capacity=places)
        selected.append(at)
        return chosen

    return flat.rows(select), selected[0]


def count_early(head: object, labels: torch.Tensor | None, ignored: int = -100) -> None:
    """Begin to count the ``labels`` that count, on a device, before the model is launched: the loss
    of the module ``head`` then waits for this number alone (``masked_rows.py``, the note). Without
    ``labels`` drop the count of an earlier forward, whose loss did not take it.
    """
    _COUNTS.pop(head, None)
    if labels is None or kinds.is_synchronous(labels.device) or graphs.arguments() is not None:
        return
    version = version_of(labels)
    if version is not None:  # writes to inference tensors are not seen: counted at the loss
        count = RowCount(labels, ignored)
        _COUNTS[head] = _EarlyCount(weakref.ref(labels), version, ignored, count)


@dataclass(frozen=True)
class _EarlyCount:
    """The count of labels that a forward was called with. The allocator gives the memory of labels
    that no longer exist to others, so an address identifies labels only while these exist.
    """

    labels: weakref.ref[torch.Tensor]
    version: int
    ignored: int
    count: RowCount

    def is_of(self, labels: torch.Tensor, ignored: int) -> bool:
        """Return whether ``labels`` are the counted ones, or a view, without writes since."""
        counted = self.labels()
        return (
            counted is not None
            and (counted.data_ptr(), counted.numel()) == (labels.data_ptr(), labels.numel())
            and (self.version, self.ignored) == (version_of(labels), ignored)
        )


_COUNTS: weakref.WeakKeyDictionary[object, _EarlyCount] = weakref.WeakKeyDictionary()
_CAPACITIES: weakref.WeakKeyDictionary[object, RowCapacity] = weakref.WeakKeyDictionary()


def _dtype_of_loss(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype of torch's own loss, which autocast may widen."""
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return logits.dtype
    sample = torch.zeros(1, 2, dtype=logits.dtype, device=logits.device)
    zero = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return F.cross_entropy(sample, zero, reduction="sum").dtype


HANDLERS.update(dict.fromkeys((F.cross_entropy, F.nll_loss), _loss))
