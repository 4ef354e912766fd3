"""Gradients with respect to deferred tensors, of which losses were computed in chunks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hf_zero.errors import KernelError
from hf_zero.ops.deferred.tensor import OF_GRADIENTS, DeferredOutput, tell

_T: type[torch.Tensor] = torch.Tensor


def _kept(function: Any, args: Any, kwargs: Any) -> Any:
    """Refuse to keep or to hook a gradient of which a part does not pass through the tensor."""
    late = kwargs.get("inputs") or () if function is torch.autograd.backward else args[:1]
    for item in late:
        if isinstance(item, DeferredOutput) and item.uses:
            raise KernelError(
                f"{function.__name__} of logits {tuple(item.shape)} after "
                f"{item.uses[0].function.__name__} of them was computed in chunks, whose gradient "
                "does not pass through them; call logits.register_hook or retain_grad before the "
                "loss, or torch.autograd.grad after it, or leave out the kernel loss"
            )
    return NotImplemented


def _gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return torch.autograd.grad with deferred tensors among its arguments.

    The gradient of a deferred tensor is the sum of those of its node, of its plain values, and of
    each result of it that was computed in chunks: the gradient of ``outputs`` with respect to the
    result, times that of the result recomputed with whole rows.
    """
    sources = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    outputs, grad_outputs = tree_map(
        lambda one: one.materialize() if isinstance(one, DeferredOutput) else one,
        (outputs, grad_outputs),
    )
    ends = [item.ends() if isinstance(item, DeferredOutput) else [item] for item in sources]
    results = [use.result for item in sources for use in getattr(item, "uses", ())]
    gradients = iter(
        torch.autograd.grad(
            outputs,
            [*chain(*ends), *results],
            grad_outputs,
            retain_graph,
            create_graph,
            allow_unused=True,
            is_grads_batched=is_grads_batched,
        )
    )
    totals = [_sum(next(gradients) for _ in group) for group in ends]
    for at, item in enumerate(sources):
        for use in getattr(item, "uses", ()):
            before = next(gradients)
            if before is None:
                continue
            if item.whole is None:
                tell("torch.autograd.grad", item)
            with torch.enable_grad():
                value = item.materialize()
                value = value if create_graph else value.detach().requires_grad_()
                again = use.recomputed(item.history, value)
            (part,) = torch.autograd.grad(
                again, value, before, create_graph=create_graph, is_grads_batched=is_grads_batched
            )
            totals[at] = _sum((totals[at], part))
    if materialize_grads:
        return tuple(
            torch.zeros_like(item) if total is None else total
            for item, total in zip(sources, totals)
        )
    unused = [at for at, total in enumerate(totals) if total is None]
    if unused and not allow_unused:
        raise RuntimeError(
            f"The differentiated Tensor at index {unused[0]} appears to not have been used in the "
            "graph. Set allow_unused=True if this is the desired behavior."
        )
    return tuple(totals)


def _sum(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return functools.reduce(torch.add, present) if present else None


OF_GRADIENTS[torch.autograd.grad] = lambda function, args, kwargs: _gradients(*args, **kwargs)
for _function in (_T.register_hook, _T.retain_grad, torch.autograd.backward):
    OF_GRADIENTS[_function] = _kept
