"""The linear head and cross-entropy as one operation that never holds the logits [tokens,
vocabulary] as a whole.

Gradients are computed in the forward, while the logits of a chunk exist, and returned in the
backward: three GEMMs instead of four, at the price of a gradient of the weight that lives from
forward to backward. :func:`linear_log_probs`, whose gradient depends on later operations,
recomputes the logits instead. z-loss is that of PaLM (Chowdhery et al. 2022, section 5),
soft-capping that of Gemma 2 (2024, section 2), label smoothing that of Szegedy et al. 2016 (section
7), as in torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

import torch

from hf_zero.device.kinds import autocast_dtype
from hf_zero.errors import KernelError
from hf_zero.ops import chunked_head
from hf_zero.ops.chunked_head import Terms, Wanted, accumulator_dtype, rows_of_a_chunk
from hf_zero.ops.operators import GradientContext

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    chunk: int | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of ``softcap · tanh(scale · (hidden @ weight.T + bias) / softcap)``
    with ``labels``: a scalar in fp32.

    ``hidden`` [..., width], ``weight`` [vocabulary, width], ``bias`` [vocabulary], ``labels`` [...]
    of integers; tokens labelled ``ignore_index`` do not count. ``reduction`` "mean" divides by
    ``num_items`` (a number or a tensor: the tokens of the whole step, under gradient accumulation)
    or, without it, by the number of labels that count; if there is none the loss is NaN and the
    gradients are 0, as in torch. ``z_loss`` adds z_loss · logsumexp² to each token's loss.
    ``chunk`` is the number of tokens whose logits exist at a time.

    Under autocast the operands are cast as a linear layer's are. Raises KernelError for shapes,
    dtypes or devices that do not fit together, and for a label outside the vocabulary on a CPU; on
    a GPU such a label makes the loss NaN.
    """
    hidden, weight, bias, labels = _prepared(hidden, weight, bias, labels, ignore_index)
    if not 0 <= label_smoothing <= 1:
        raise KernelError(
            f"label_smoothing={label_smoothing}: a share of the target; give a number from 0 to 1"
        )
    if reduction not in ("mean", "sum"):
        raise KernelError(
            f"reduction={reduction!r}: give 'mean' or 'sum'; linear_log_probs "
            "gives each token's own"
        )
    if reduction == "sum" and num_items is not None:
        raise KernelError(
            "num_items with reduction='sum': a sum is not divided; leave one of them out"
        )
    rows = _rows(chunk, hidden, weight)
    grad_enabled = torch.is_grad_enabled()
    total, *_ = torch.ops.hf_zero.linear_cross_entropy(
        hidden, weight, bias, labels, ignore_index, label_smoothing, z_loss, softcap or 0.0, scale,
        rows,
        grad_enabled and hidden.requires_grad, grad_enabled and weight.requires_grad,
        grad_enabled and bias is not None and bias.requires_grad,
    )  # fmt: skip
    if reduction == "sum":
        return total
    count = (labels != ignore_index).sum() if num_items is None else num_items
    if not isinstance(count, torch.Tensor):
        count = total.new_full((), count)
    if count.numel() != 1:
        raise KernelError(
            f"num_items has shape {tuple(count.shape)}: the loss is divided by one number; give "
            "their sum"
        )
    count = count.reshape(())
    inverse = count.to(total.device, total.dtype, non_blocking=True).reciprocal()
    # 0 / 0 is NaN, as in torch, but zero gradients stay zero.
    return total * inverse.nan_to_num(posinf=0.0) + inverse * 0.0


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return the log-probability of each label, in fp32 and of ``labels``' shape; 0, without a
    gradient, where the label is ``ignore_index``.

    For losses over sequences, such as DPO's (Rafailov et al. 2023). Arguments and errors as in
    :func:`linear_cross_entropy`.
    """
    shape = labels.shape
    hidden, weight, bias, labels = _prepared(hidden, weight, bias, labels, ignore_index)
    rows = _rows(chunk, hidden, weight)
    log_probs, _ = torch.ops.hf_zero.linear_log_probs(
        hidden, weight, bias, labels, ignore_index, softcap or 0.0, scale, rows
    )
    return log_probs.view(shape)


def _prepared(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Check the arguments; return them flat and in the dtype that autocast chooses."""
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise KernelError(
            f"hidden {tuple(hidden.shape)} with weight {tuple(weight.shape)}: give [..., width] "
            "and [vocabulary, width]"
        )
    if labels.shape != hidden.shape[:-1]:
        raise KernelError(
            f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}: one label a token; "
            "shift both alike before"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise KernelError(
            f"bias {tuple(bias.shape)} with weight {tuple(weight.shape)}: give [vocabulary]"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise KernelError(
            f"labels are {labels.dtype}: give int64 or int32 class numbers; "
            "probabilities are not supported"
        )
    device = hidden.device
    for name, tensor in (("weight", weight), ("bias", bias), ("labels", labels)):
        if tensor is not None and tensor.device != device:
            raise KernelError(
                f"{name} is on {tensor.device} and hidden on {device}: move them to one device"
            )
    if (dtype := autocast_dtype(device.type)) is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if (
        hidden.dtype not in DTYPES
        or weight.dtype != hidden.dtype
        or (bias is not None and bias.dtype != hidden.dtype)
    ):
        dtypes = f"{hidden.dtype}, {weight.dtype}" + ("" if bias is None else f" and {bias.dtype}")
        raise KernelError(
            f"hidden, weight{'' if bias is None else ' and bias'} are {dtypes}: give one of fp32, "
            "bf16, fp16 for all, or use autocast"
        )
    labels = labels.reshape(-1).to(torch.int64)
    if device.type == "cpu" and labels.numel() and not torch.compiler.is_compiling():
        strange = labels[((labels < 0) | (labels >= weight.shape[0])) & (labels != ignore_index)]
        if strange.numel():
            raise KernelError(
                f"label {int(strange[0])} with a vocabulary of {weight.shape[0]} and ignore_index "
                f"{ignore_index}: mask or map it first"
            )
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels


def _rows(chunk: int | None, hidden: torch.Tensor, weight: torch.Tensor) -> int:
    if chunk is None:
        return rows_of_a_chunk(
            hidden.shape[0], weight.shape[0], hidden.element_size(), hidden.device
        )
    if chunk < 1:
        raise KernelError(
            f"chunk={chunk}: the number of tokens whose logits exist at a time; "
            "give 1 or more, or None"
        )
    return chunk


@torch.library.custom_op("hf_zero::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
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
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, scale)
    needs = Wanted(for_hidden, for_weight, for_bias)
    with torch.autocast(hidden.device.type, enabled=False):  # the operands have been cast
        total, grads = chunked_head.losses_and_gradients(
            hidden.contiguous(), weight.detach(), bias, labels, terms, needs, rows
        )
    return total, *grads.finish()


@_forward.register_fake
def _(
    hidden,
    weight,
    bias,
    labels,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    scale,
    rows,
    for_hidden,
    for_weight,
    for_bias,
):  # type: ignore[no-untyped-def]
    dtype = accumulator_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(hidden.shape if for_hidden else 0, dtype=dtype),
        hidden.new_empty(weight.shape if for_weight else 0, dtype=dtype),
        hidden.new_empty(weight.shape[0] if for_bias else 0, dtype=dtype),
    )


@torch.library.custom_op("hf_zero::linear_cross_entropy_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, sums: list[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return gradients from those of the sum: each times ``grad``, rounded to ``dtype`` once."""
    return [_scaled(gradient, grad, dtype) for gradient in sums]


@_backward.register_fake
def _(grad: torch.Tensor, sums: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(gradient, dtype=dtype) for gradient in sums]


def _scaled(gradient: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mul(gradient, grad, out=torch.empty_like(gradient, dtype=dtype))


def _keep_sums(
    ctx: GradientContext,
    inputs: tuple[torch.Tensor, *tuple[object, ...]],
    output: tuple[torch.Tensor, ...],
) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    hidden, *others = inputs
    ctx.dtype, ctx.wanted = hidden.dtype, others[-3:]


def _hand_out(
    ctx: GradientContext, grad: torch.Tensor | None, *unused: object
) -> tuple[torch.Tensor | None, ...]:
    gradients: list[torch.Tensor | None] = [None, None, None]
    if grad is not None:
        places = [index for index, is_needed in enumerate(ctx.wanted) if is_needed]
        sums = [ctx.saved_tensors[index] for index in places]
        traced = type(grad) is not torch.Tensor
        if (
            sums
            and not traced
            and sums[0].dtype == ctx.dtype
            and not torch._C._autograd._get_current_graph_task_keep_graph()
        ):
            # no further backward follows: scale in place, without a second copy of the weight's
            # gradient
            scaled = [gradient.mul_(grad) for gradient in sums]
        else:
            scaled = torch.ops.hf_zero.linear_cross_entropy_backward(grad, sums, ctx.dtype)
        for index, gradient in zip(places, scaled):
            gradients[index] = gradient
    return (*gradients, *[None] * 10)


_forward.register_autograd(_hand_out, setup_context=_keep_sums)


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
            hidden.contiguous(), weight.detach(), bias, labels, terms, rows
        )


@_log_probs.register_fake
def _(hidden, weight, bias, labels, ignore_index, softcap, scale, rows):
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
    needs = Wanted(for_hidden, for_weight, for_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        grads = chunked_head.log_probabilities_backward(
            grad.contiguous(),
            hidden.contiguous(),
            weight.detach(),
            bias,
            labels,
            lse,
            terms,
            needs,
            rows,
        )
    dtype = hidden.dtype
    first, second, third = (
        gradient if gradient.dtype == dtype else gradient.to(dtype) for gradient in grads.finish()
    )
    return first, second, third


@_log_probs_backward.register_fake
def _(
    grad,
    hidden,
    weight,
    bias,
    labels,
    lse,
    ignore_index,
    softcap,
    scale,
    rows,
    for_hidden,
    for_weight,
    for_bias,
):  # type: ignore[no-untyped-def]
    return (
        hidden.new_empty(hidden.shape if for_hidden else 0),
        hidden.new_empty(weight.shape if for_weight else 0),
        hidden.new_empty(weight.shape[0] if for_bias else 0),
    )


def _keep_arguments(
    ctx: GradientContext,
    inputs: tuple[
        torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, *tuple[object, ...]
    ],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight, bias, labels, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, bias, labels, output[1])


def _recompute(
    ctx: GradientContext, grad: torch.Tensor | None, *unused: object
) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    needs = list(ctx.needs_input_grad[:3])
    grads = torch.ops.hf_zero.linear_log_probs_backward(
        grad, *ctx.saved_tensors, *ctx.numbers, *needs
    )
    return (*(g if need else None for g, need in zip(grads, needs)), *[None] * 5)


_log_probs.register_autograd(_recompute, setup_context=_keep_arguments)
