"""Operators of torch that eager code calls without their dispatch.

[Note: the short way]
An operator of ``torch.library.custom_op`` is what torch.compile traces, what dispatch modes see
(selective checkpoints, FLOP counters) and what has a fake implementation. Each eager call of one
goes through several dispatch keys and layers of Python, forward and backward: without
torch.compile, hosts were busy with them for longer than the GPU with a small model. Where nobody
looks at operators, an :class:`Operator` calls its function in an ``autograd.Function`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

R = TypeVar("R")
_PLAIN = (torch.Tensor, nn.Parameter)
_is_batched = torch._C._functorch.is_legacy_batchedtensor


class GradientContext(Protocol):
    """The ``ctx`` of an ``autograd.Function``: methods of torch, and attributes that its forward
    sets for its backward.
    """

    # None where None was saved
    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]: ...

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


class Operator(Generic[R]):
    """The operator ``name`` of ``function``, whose arguments are tensors, sequences of tensors and
    plain values, and which writes to none of them. ``operator``: that of torch.library.
    """

    def __init__(self, name: str, function: Callable[..., R]) -> None:
        self.operator = torch.library.custom_op(name, mutates_args=())(function)
        self._name, self._function = name, function
        self._node: Any = None

    def register_fake(self, fake: Callable[..., object]) -> Callable[..., object]:
        """Register ``fake``, which makes outputs without values."""
        return self.operator.register_fake(fake)

    def register_autograd(
        self, gradient: Callable[..., object], setup_context: Callable[..., None]
    ) -> None:
        """Register ``gradient(ctx, *grads)``, which returns one for each argument, and
        ``setup_context(ctx, inputs, output)``, as torch.library.register_autograd does.
        """
        self.operator.register_autograd(gradient, setup_context=setup_context)
        self._node = _node_of(self._name, self._function, gradient, setup_context)

    def __call__(self, *args: object) -> R:
        if torch.compiler.is_compiling() or not _is_plain(args):
            return self.operator(*args)
        if not (torch.is_grad_enabled() and any(map(_requires_grad, args))):
            return self._function(*args)
        if self._node is None:  # it says that there is no gradient
            return self.operator(*args)
        lengths = tuple(len(arg) if isinstance(arg, (tuple, list)) else -1 for arg in args)
        return self._node.apply(lengths, *_flat(args, lengths))


def operator(name: str) -> Callable[[Callable[..., R]], Operator[R]]:
    """Decorator that makes an :class:`Operator` of a function, as torch.library.custom_op does."""
    return lambda function: Operator(name, function)


def _is_plain(args: Sequence[object]) -> bool:
    """Return whether nothing but autograd looks at an operation on ``args``."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
    ) and all(map(_has_values, args))


def _has_values(arg: object) -> bool:
    """Return whether kernels can read the memory of ``arg``. Not that of a view that negates, nor
    of the vmap of batched gradients (``is_grads_batched``), which is no transform of functorch.
    """
    if isinstance(arg, torch.Tensor):
        return type(arg) in _PLAIN and not (arg.is_meta or arg.is_neg() or _is_batched(arg))
    return all(map(_has_values, arg)) if isinstance(arg, (tuple, list)) else True


def _requires_grad(arg: object) -> bool:
    if isinstance(arg, torch.Tensor):
        return arg.requires_grad
    return any(map(_requires_grad, arg)) if isinstance(arg, (tuple, list)) else False


def _flat(args: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Return ``args`` with the items of its sequences, whose ``lengths`` are not -1, in a row."""
    flat: list[Any] = []
    for arg, length in zip(args, lengths, strict=True):
        if length < 0:
            flat.append(arg)
        else:
            flat += [None] * length if arg is None else arg
    return flat


def _nested(flat: Sequence[object], lengths: Sequence[int]) -> tuple[object, ...]:
    """Return the arguments of which ``_flat`` made ``flat``."""
    items = iter(flat)
    return tuple(
        next(items) if length < 0 else [next(items) for _ in range(length)] for length in lengths
    )


def _node_of(
    name: str,
    function: Callable[..., object],
    gradient: Callable[..., Any],
    keep: Callable[..., None],
) -> type:
    """Return the autograd.Function that profilers and anomaly detection show as ``name``."""

    class Node:
        @staticmethod
        def forward(ctx: GradientContext, lengths: tuple[int, ...], *flat: object) -> object:
            args = _nested(flat, lengths)
            ctx.lengths, ctx.needed = lengths, _nested(ctx.needs_input_grad[1:], lengths)
            output = function(*args)
            keep(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: GradientContext, *grads: Any) -> tuple[torch.Tensor | None, ...]:
            ctx.needs_input_grad = ctx.needed
            return None, *_flat(gradient(ctx, *grads), ctx.lengths)

    return type(name, (Node, torch.autograd.Function), {})
