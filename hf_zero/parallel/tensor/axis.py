"""The tensor-parallel ranks of this rank, and the collectives on activations at the borders of
sharded layers.

Megatron's f and g (arXiv 1909.08053, section 3), and the two that result in whole tensors:

    function   forward             backward
    copy_to    identity            sum over the ranks
    sum_over   sum over the ranks  identity
    gather     parts joined        own part
    split      own part            parts joined
    own_part   own part            own part, zeros elsewhere: a partial sum, not reduced here

Each is correct if the gradient of a replicated tensor is the same on all ranks. Their backwards are
differentiable, as each is the forward of another: so are second derivatives, but not those beside
the sum (``shared_inputs.py``, the note).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.errors import PartitionError
from hf_zero.ops.operators import GradientContext

STRETCH = 64 << 20  # bytes of joined tensors per all-gather

_axes: weakref.WeakValueDictionary[int, TensorAxis] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class TensorAxis:
    """The ranks along the axis "tensor" as seen by sharded layers; one instance is shared by all
    layers of a model and of its copies.
    """

    is_rehearsed = False  # True: graphs are only analyzed, never run

    def __init__(self, dim: MeshDim):
        self.dim = dim
        self._register(dim.rank, dim.size)

    def _register(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # compiled code passes this number to operators and finds the axis by it
        self.number = next(_numbers)
        _axes[self.number] = self

    def __deepcopy__(self, memo: dict[int, object]) -> TensorAxis:
        return self

    def sum(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum of ``x`` over the ranks, a new tensor; ``name``: the collective's name in
        CollectiveStats.
        """
        total, under_way = self.launch_sum(x, name)
        under_way.wait()
        return total

    def launch_sum(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, Handle]:
        """Launch :meth:`sum`; return the result, valid after waiting for the handle, and the
        handle.
        """
        total = x.detach().clone(memory_format=torch.contiguous_format)
        return total, self.dim.all_reduce(total, name)

    def join(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Join [..., n] of each rank to [..., size * n], in chunks of at most :data:`STRETCH`
        bytes, so that the all-gather buffer takes no more memory than that beside the result.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        joined = rows.new_empty(len(rows), self.size, x.shape[-1])
        most = max(1, STRETCH // max(1, self.size * x.shape[-1] * x.element_size()))
        for part, target in zip(rows.split(most), joined.split(most)):
            by_rank = part.new_empty(self.size * part.numel())
            self.dim.all_gather([(by_rank, part.contiguous().view(-1))], name).wait()
            target.copy_(by_rank.view(self.size, *part.shape).transpose(0, 1))
        return joined.view(*x.shape[:-1], self.size * x.shape[-1])

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of [..., size * n]: [..., n]."""
        width = x.shape[-1] // self.size
        return x.narrow(-1, self.rank * width, width)


# Compiled code calls the collectives as opaque operators. CUDA graphs exclude them: events recorded
# in a capture cannot be queried, and a replay would skip the work on the host.
UNSAFE = (torch.Tag.cudagraph_unsafe,)  # torch 2.11 takes no single tag


@torch.library.custom_op("hf_zero::tensor_parallel_sum", mutates_args=(), tags=UNSAFE)
def _sum_operator(x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
    return _axes[axis].sum(x, name)


@_sum_operator.register_fake
def _(x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_zero::tensor_parallel_join", mutates_args=(), tags=UNSAFE)
def _join_operator(x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
    return _axes[axis].join(x, name)


@_join_operator.register_fake
def _(x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _axes[axis].size * x.shape[-1])


def _sum(x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _sum_operator(x, axis, name)
    return _axes[axis].sum(x, name)


def _join(x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _join_operator(x, axis, name)
    return _axes[axis].join(x, name)


class GradientsBeside(Protocol):
    """Gradients of ``weights`` that a backward computes while it sums that of their input."""

    weights: Sequence[torch.nn.Parameter]

    def compute(self, x: torch.Tensor) -> list[torch.Tensor | None]: ...


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext,
        x: torch.Tensor,
        axis: int,
        name: str,
        beside: GradientsBeside | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.axis, ctx.name, ctx.beside = axis, name, beside
        if beside is not None:
            ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if ctx.beside is None:
            return _SumOver.apply(grad, ctx.axis, ctx.name), None, None, None
        if torch.is_grad_enabled():
            raise PartitionError(
                f"a backward with create_graph=True passes the inputs of {ctx.name}, whose layers "
                "are cut over tensor-parallel ranks and multiply with their weights as constants, "
                "so second derivatives would lack these weights; freeze the weights, or train "
                "without tensor_parallel"
            )
        total, under_way = _axes[ctx.axis].launch_sum(grad, ctx.name)
        gradients = ctx.beside.compute(*ctx.saved_tensors)
        under_way.wait()
        return total, None, None, None, *gradients


class _CopyLast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, x: torch.Tensor, axis: int, name: str, width: int
    ) -> torch.Tensor:
        ctx.axis, ctx.name, ctx.width = axis, name, width
        return x.view_as(x)

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        complete, parts = grad.split([grad.shape[-1] - ctx.width, ctx.width], -1)
        total = _SumOver.apply(parts, ctx.axis, ctx.name)
        return torch.cat([complete, total], -1), None, None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: GradientContext, x: torch.Tensor, axis: int, name: str) -> torch.Tensor:
        ctx.axis, ctx.name = axis, name
        return _sum(x, axis, name)

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # the identity of a first derivative
            grad = _CopyTo.apply(grad, ctx.axis, ctx.name, None)
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, x: torch.Tensor, axis: int, name: str, start: int, width: int
    ) -> torch.Tensor:
        ctx.start, ctx.width, ctx.axis, ctx.name = start, width, axis, name
        return _join(x, axis, name)

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        part = _Split.apply(grad, ctx.axis, ctx.name, ctx.start, ctx.width)
        return part, None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, x: torch.Tensor, axis: int, name: str, start: int, width: int
    ) -> torch.Tensor:
        ctx.start, ctx.width, ctx.axis, ctx.name = start, width, axis, name
        return x.narrow(-1, start, width)

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        whole = _Gather.apply(grad, ctx.axis, ctx.name, ctx.start, ctx.width)
        return whole, None, None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, x: torch.Tensor, name: str, start: int, width: int
    ) -> torch.Tensor:
        ctx.name, ctx.start, ctx.width, ctx.whole = name, start, width, x.shape[-1]
        return x.narrow(-1, start, width)

    @staticmethod
    def backward(ctx: GradientContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        after = ctx.whole - ctx.start - ctx.width
        return torch.nn.functional.pad(grad, (ctx.start, after)), None, None, None


class Border(NamedTuple):
    """What a function does to activations and to their gradients."""

    takes_parts: bool  # its input is a part, else whole
    makes_parts: bool  # its output is a part, else whole
    completes_gradient: bool  # the gradient of its whole input is complete on each rank
    sums_gradient: bool = (
        False  # its backward sums the gradient of all elements: it must be partial
    )


BORDERS: dict[type, Border] = {
    _CopyTo: Border(False, False, True, sums_gradient=True),
    _CopyLast: Border(False, False, True),
    _SumOver: Border(True, False, False),
    _Gather: Border(True, False, False),
    _Split: Border(False, True, True),
    _OwnPart: Border(False, True, False),
}


def border_of(node: torch.autograd.graph.Node) -> Border | None:
    """Return what the function of ``node`` in a graph does, None for one of another module."""
    return BORDERS.get(getattr(node, "_forward_cls", type(None)))


def copy_to(
    x: torch.Tensor, axis: TensorAxis, name: str, beside: GradientsBeside | None = None
) -> torch.Tensor:
    """Return ``x``, equal on all ranks, as input of layers of which each rank has a part.
    ``beside``: the gradients of their weights, computed while the backward's sum is in flight.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    weights = () if beside is None else beside.weights
    return _CopyTo.apply(  # type: ignore[no-any-return,no-untyped-call]
        x, axis.number, name, beside, *weights
    )


def copy_last_to(x: torch.Tensor, axis: TensorAxis, name: str, width: int) -> torch.Tensor:
    """Return ``x``, whose last ``width`` elements are read by layers cut over the ranks."""
    return _CopyLast.apply(x, axis.number, name, width)  # type: ignore[no-any-return,no-untyped-call]


def sum_over(x: torch.Tensor, axis: TensorAxis, name: str) -> torch.Tensor:
    """Return the sum over the ranks of ``x``, which each has computed with its part."""
    return _SumOver.apply(x, axis.number, name)  # type: ignore[no-any-return,no-untyped-call]


def gather(x: torch.Tensor, axis: TensorAxis, name: str) -> torch.Tensor:
    """Join [..., n] of each rank to [..., size * n] on all of them."""
    width = x.shape[-1]
    return _Gather.apply(  # type: ignore[no-any-return,no-untyped-call]
        x, axis.number, name, axis.rank * width, width
    )


def split(x: torch.Tensor, axis: TensorAxis, name: str) -> torch.Tensor:
    """Return this rank's [..., n] of ``x`` [..., size * n], which is equal on all ranks."""
    width = x.shape[-1] // axis.size
    return _Split.apply(  # type: ignore[no-any-return,no-untyped-call]
        x, axis.number, name, axis.rank * width, width
    )


def own_part(x: torch.Tensor, name: str, start: int, width: int) -> torch.Tensor:
    """Return the ``width`` elements from ``start`` of ``x`` [..., n], which is equal on all ranks.
    The gradient of ``x`` is partial: zero outside these elements, and not summed here.
    """
    return _OwnPart.apply(x, name, start, width)  # type: ignore[no-any-return,no-untyped-call]
