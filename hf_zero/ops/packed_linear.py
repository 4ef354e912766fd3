"""Linear layers of one input as one matrix product: q, k and v, or gate and up.

Weights that are adjacent in memory, as :func:`pack_` places them and as the engine keeps
neighbors, are read as one matrix without a copy. They stay separate parameters: names, checkpoints
and gradients do not change. Weights that are not adjacent are multiplied one by one into their part
of one result. cuBLAS does the work, through torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_zero.errors import KernelError
from hf_zero.ops.dispatch import as_rows
from hf_zero.ops.operators import GradientContext, operator


def packed_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Return ``x @ w.T + b`` of all weights in one tensor, [..., sum of outputs].

    For consumers of the packed form (``swiglu_packed``): their gradient is then
    one tensor, where the gradients of views would be concatenated.

    Args:
        x: [..., inputs].
        weights: each [outputs, inputs], of x's dtype.
        biases: for each weight [outputs] or None.

    Raises:
        KernelError: there is no weight, or a dtype, device or shape does not fit.
    """
    weights, terms = list(weights), list(biases or [])
    _check(x, weights, terms)
    if torch.is_autocast_enabled(x.device.type) or (
        any(b is None for b in terms) and any(b is not None for b in terms)
    ):
        filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, terms)]
        return F.linear(
            x, torch.cat(weights), torch.cat(filled) if any(b is not None for b in terms) else None
        )
    return _packed_linear(x, weights, [b for b in terms if b is not None])


def pack_(parameters: Sequence[nn.Parameter], model: nn.Module | None = None) -> None:
    """Move the values of ``parameters`` into one new buffer, in their order, so that they are
    adjacent.

    The parameters stay the same objects. Nothing is done if they are adjacent already. Call it
    before an optimizer's or engine's own buffers are made: those would keep the former memory.

    Args:
        parameters: all [outputs, inputs] with the same inputs, or all [outputs]; of one dtype, on
            one device.
        model: searched for other parameters in the same memory.

    Raises:
        KernelError: they differ, one has no values here (sharded or on the meta device), one is
            given twice, or one shares its memory with another tensor, from which it would be
            untied.
    """
    parameters = list(parameters)
    if not parameters or adjacent(parameters):
        return
    _check_packable(parameters, model)
    first = parameters[0]
    buffer = first.detach().new_empty(sum(p.shape[0] for p in parameters), *first.shape[1:])
    for parameter, part in zip(parameters, buffer.split([p.shape[0] for p in parameters])):
        part.copy_(parameter.detach())
        parameter.data = part


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return whether ``tensors`` are adjacent in one storage, as slices of the first axis of one
    contiguous tensor.
    """
    first = tensors[0]
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.data_ptr() != end
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
        ):
            return False
        end += tensor.numel() * tensor.element_size()
    return first.numel() > 0


def _whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent tensors as one view, [sum of the first axes, ...], or None."""
    if not adjacent(tensors):
        return None
    first = tensors[0].detach()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def _check(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> None:
    if not weights:
        raise KernelError("packed_linear: no weights; give at least one")
    if biases and len(biases) != len(weights):
        raise KernelError(
            f"packed_linear: {len(biases)} biases for {len(weights)} weights; give one for each, "
            "None where there is none"
        )
    autocast = torch.is_autocast_enabled(x.device.type)
    for number, weight in enumerate(weights):
        if weight.dim() != 2 or x.dim() == 0 or weight.shape[1] != x.shape[-1]:
            raise KernelError(
                f"packed_linear: weight {number} has shape {list(weight.shape)} for an x of shape "
                f"{list(x.shape)}; give [outputs, inputs] and [..., inputs]"
            )
        bias = biases[number] if biases else None
        if bias is not None and bias.shape != weight.shape[:1]:
            raise KernelError(
                f"packed_linear: bias {number} has shape {list(bias.shape)} for a weight of "
                f"{weight.shape[0]} outputs; give [outputs]"
            )
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and (
                tensor.device != x.device or (tensor.dtype != x.dtype and not autocast)
            ):
                raise KernelError(
                    f"packed_linear: {name} {number} is {tensor.dtype} on {tensor.device} and x "
                    f"{x.dtype} on {x.device}; cast or move one of them"
                )


def _check_packable(parameters: list[nn.Parameter], model: nn.Module | None) -> None:
    first = parameters[0]
    others = {id(p): (n, p) for n, p in (model.named_parameters() if model is not None else ())}
    for number, parameter in enumerate(parameters):
        others.pop(id(parameter), None)
        size = parameter.numel() * parameter.element_size()
        if parameter.is_meta or not 0 < size <= parameter.untyped_storage().nbytes():
            raise KernelError(
                f"pack_: parameter {number} of shape {list(parameter.shape)} has no values here; "
                "pack before the model is sharded"
            )
        if (
            parameter.dtype != first.dtype
            or parameter.device != first.device
            or parameter.shape[1:] != first.shape[1:]
        ):
            raise KernelError(
                f"pack_: parameter {number} is {parameter.dtype} {list(parameter.shape)} on "
                f"{parameter.device} and the first {first.dtype} {list(first.shape)} on "
                f"{first.device}; pack parameters that differ in the first axis only"
            )
        if any(parameter is other for other in parameters[:number]):
            raise KernelError(
                f"pack_: parameter {number} is given twice; it can lie in one place only"
            )
        if parameter.untyped_storage().nbytes() != size:
            raise KernelError(
                f"pack_: parameter {number} is a view of a larger buffer, from which it would be "
                "torn; give it memory of its own first"
            )
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) != len(parameters):
        raise KernelError(
            "pack_: two of the parameters share their memory and would be untied; pack one of them"
        )
    for name, parameter in others.values():
        if parameter.untyped_storage().data_ptr() in storages:
            raise KernelError(
                f"pack_: {name} shares the memory of a parameter to be packed and would be untied; "
                "make them one parameter"
            )


@operator("hf_zero::packed_linear")
def _packed_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Compute the packed product, with biases for all weights or for none."""
    out = x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights))
    if out.numel() == 0:
        return out
    if x.shape[-1] == 0:  # a sum of nothing
        return out.copy_(torch.cat(list(biases))) if biases else out.zero_()
    rows, result = as_rows(x), as_rows(out)  # [tokens, inputs], [tokens, outputs]
    matrix = _whole(weights)
    if matrix is not None:
        bias = (_whole(biases) if adjacent(biases) else torch.cat(list(biases))) if biases else None
        _multiply(rows, matrix, bias, result)
    else:
        parts = result.split([w.shape[0] for w in weights], dim=1)
        for number, (weight, part) in enumerate(zip(weights, parts)):
            _multiply(rows, weight, biases[number] if biases else None, part)
    return out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@operator("hf_zero::packed_linear_backward")
def _packed_linear_backward(
    dy: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    x_trains: bool,
    weights_train: bool,
    biases_train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx like x, dw [outputs, inputs] and db [outputs] for all weights in one; gradients
    that are not wanted are empty.
    """
    dx, dw, db = _gradients(dy, x, x_trains, weights_train, biases_train)
    if dy.numel() == 0 or x.shape[-1] == 0:
        if biases_train:
            torch.sum(as_rows(dy), 0, out=db)
        return dx.zero_(), dw.zero_(), db
    grad, rows = as_rows(dy), as_rows(x)  # [tokens, outputs], [tokens, inputs]
    if x_trains:
        matrix, result = _whole(weights), as_rows(dx)
        if matrix is not None:
            torch.mm(grad, matrix, out=result)
        else:
            parts = grad.split([w.shape[0] for w in weights], dim=1)
            torch.mm(parts[0], weights[0], out=result)
            for part, weight in zip(parts[1:], weights[1:]):
                result.addmm_(part, weight)
    if weights_train:
        torch.mm(grad.t(), rows, out=dw)
    if biases_train:
        torch.sum(grad, 0, out=db)
    return dx, dw, db


def _gradients(
    dy: Tensor, x: Tensor, x_trains: bool, weights_train: bool, biases_train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = dy.shape[-1]
    return (
        x.new_empty(x.shape if x_trains else (0,)),
        x.new_empty((outputs, x.shape[-1]) if weights_train else (0,)),
        x.new_empty((outputs,) if biases_train else (0,)),
    )


@_packed_linear.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights))


@_packed_linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    x_trains: bool,
    weights_train: bool,
    biases_train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(dy, x, x_trains, weights_train, biases_train)


def _keep_input(
    ctx: GradientContext, inputs: tuple[Tensor, list[Tensor], object], output: Tensor
) -> None:
    x, weights, _ = inputs
    ctx.outputs = [w.shape[0] for w in weights]
    ctx.save_for_backward(x, *weights)


def _gradient(ctx: GradientContext, dy: Tensor) -> tuple[object, ...]:
    try:
        x, *weights = ctx.saved_tensors
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise KernelError(
            "a second backward through linear layers that one product computes (kernels: qkv and "
            "the like): the first has freed what they saved; call one backward of the sum of the "
            "losses, pass retain_graph=True to the first, or leave that name out of kernels"
        ) from error
    x_trains, weights_train, biases_train = ctx.needs_input_grad
    dx, dw, db = _packed_linear_backward(
        dy, x, weights, x_trains, any(weights_train), any(biases_train)
    )
    return (
        dx if x_trains else None,
        _parts(dw, ctx.outputs, weights_train),
        _parts(db, ctx.outputs, biases_train),
    )


def _parts(whole: Tensor, outputs: list[int], needed: Sequence[bool]) -> list[Tensor | None]:
    """Split ``whole`` into the gradient of each weight or bias, None if it is not wanted."""
    if not any(needed):
        return [None] * len(needed)
    return [part if want else None for part, want in zip(whole.split(outputs), needed)]


_packed_linear.register_autograd(_gradient, setup_context=_keep_input)
