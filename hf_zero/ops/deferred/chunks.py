"""Functions of rows, computed chunk by chunk: the values of a chunk exist at a time, in the forward
and again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_zero.ops import linear_cross_entropy as _operators  # noqa: F401  # registers the operator
from hf_zero.ops.chunked_head import accumulator_dtype
from hf_zero.ops.operators import GradientContext

Function = Callable[..., torch.Tensor]


def by_rows(
    function: Function, rows: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], size: int
) -> torch.Tensor:
    """Return ``function(*rows, *shared)`` [n, ...], computed for ``size`` rows at a time.

    Row i of the result must depend on row i of each of ``rows`` alone. If all rows are one chunk,
    torch records and keeps it; else the backward computes each chunk again.
    """
    if rows[0].shape[0] <= size:
        return function(*rows, *shared)
    return _ByRows.apply(function, len(rows), size, *rows, *shared)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, function: Function, number: int, size: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.function, ctx.number, ctx.size = function, number, size
        ctx.save_for_backward(*tensors)
        rows, shared = tensors[:number], tensors[number:]
        parts = [
            function(*chunk, *shared) for chunk in zip(*(tensor.split(size) for tensor in rows))
        ]
        result = torch.cat(parts)
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        function, number, size = ctx.function, ctx.number, ctx.size
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if is_out_of_place(grad):
            return None, None, None, *recorded(function, tensors, needed, grad)
        sums: list[torch.Tensor | None] = [None] * len(tensors)  # None of those without a gradient
        shared = tensors[number:]
        for start in range(0, grad.shape[0], size):
            chunk = slice(start, start + size)
            leaves = [
                tensor.detach().requires_grad_(is_needed)
                for tensor, is_needed in zip(
                    (*(r[chunk] for r in tensors[:number]), *shared), needed
                )
            ]
            with torch.enable_grad():
                result = function(*leaves)
            wanted_ones = [tensor for tensor in leaves if tensor.requires_grad]
            grads = iter(torch.autograd.grad(result, wanted_ones, grad[chunk], allow_unused=True))
            for at, tensor in enumerate(tensors):
                part = next(grads) if needed[at] else None
                if part is None:
                    continue
                total = sums[at]
                if total is None:
                    dtype = accumulator_dtype(tensor.dtype)
                    sums[at] = total = torch.zeros_like(tensor, dtype=dtype)
                (total[chunk] if at < number else total).add_(part)
        ctx.function = None if not _kept() else function
        return (
            None,
            None,
            None,
            *(
                None if total is None else total.to(tensor.dtype)
                for total, tensor in zip(sums, tensors)
            ),
        )


def recorded(
    function: Function, tensors: Sequence[torch.Tensor], needed: Sequence[bool], grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return gradients of ``function(*tensors)``, with create_graph ones with a graph."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # aliases: hidden states may be made of the weight (a tied one), and a gradient of the
        # weight itself would have that path, too
        aliases = [
            tensor if not one else tensor.view_as(tensor) if again else tensor.detach()
            for tensor, one in zip(tensors, needed)
        ]
        inputs = [alias.requires_grad_() for alias, one in zip(aliases, needed) if one]
        result = function(*aliases)
    grads = iter(torch.autograd.grad(result, inputs, grad, create_graph=again, allow_unused=True))
    return [next(grads) if one else None for one in needed]


def is_out_of_place(grad: torch.Tensor) -> bool:
    """Return whether gradients are computed over whole rows, out of place: with create_graph
    or is_grads_batched.
    """
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad)


def _kept() -> bool:
    """Return whether the graph of the backward under way is kept for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class SummedLoss(torch.autograd.Function):
    """The sum of cross-entropies of a linear head: its gradients are computed in the forward, while
    the logits of a chunk exist.

    ``plain(hidden, weight, bias)`` is the same sum with whole logits, for a second derivative.
    """

    @staticmethod
    def forward(
        ctx: GradientContext,
        plain: Function,
        numbers: tuple[Any, ...],
        labels: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad[3:]
        total, *sums = torch.ops.hf_zero.linear_cross_entropy(
            hidden, weight.detach(), bias, labels, *numbers, *needs
        )
        ctx.plain, ctx.sums, ctx.dtype = plain, sums, hidden.dtype
        ctx.has_labels = (labels != numbers[0]).any()
        # checked for changes until the backward, and read by a second derivative
        ctx.save_for_backward(hidden, weight, bias)
        return total

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        if is_out_of_place(grad):
            return None, None, None, *recorded(ctx.plain, tensors, needs, grad)
        grad = grad.where(ctx.has_labels, 0.0)  # ignored rows have gradients of 0, of a NaN, too
        sums, keeps_graph = ctx.sums, _kept()
        if not keeps_graph:
            ctx.sums = None
        gradients: list[torch.Tensor | None] = []
        for total, is_needed in zip(sums, needs):
            if not is_needed:
                gradients.append(None)
            elif not keeps_graph and total.dtype == ctx.dtype:
                gradients.append(total.mul_(grad))
            else:
                gradients.append(
                    torch.mul(total, grad, out=torch.empty_like(total, dtype=ctx.dtype))
                )
        return None, None, None, *gradients
