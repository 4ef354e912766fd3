"""Functions of torch that a deferred tensor takes without being computed: metadata, selections of
rows, steps that are recorded, and reductions over the last dimension, computed in chunks.

Every handler returns NotImplemented for arguments that it does not know; the tensor is computed
then. Handlers compute what the function itself returns for small or empty plain tensors, to learn
shapes, dtypes and errors from torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hf_zero.ops.chunked_head import accumulator_dtype
from hf_zero.ops.deferred import heads, programs
from hf_zero.ops.deferred.facts import named
from hf_zero.ops.deferred.programs import Operand, Vector
from hf_zero.ops.deferred.tensor import HANDLERS, DeferredOutput

T = TypeVar("T")
_T: type[torch.Tensor] = torch.Tensor


def _is_deferred(value: object) -> TypeGuard[DeferredOutput]:
    return isinstance(value, DeferredOutput)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _some_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor [0, width] with the dtype and the device of ``tensor``."""
    return torch.empty((0, tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)


def _owned(value: object) -> object:
    """Return a copy of a plain tensor, and anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _only_first(args: Any, kwargs: Any) -> bool:
    """Return whether the first argument alone is deferred."""
    return _is_deferred(args[0] if args else None) and not any(
        _is_deferred(item) for item in (*args[1:], *kwargs.values())
    )


def _reshaped(function: Any, args: Any, kwargs: Any) -> Any:
    """Handle functions that keep the order of elements: rows stay rows if the width does."""
    logits: object = args[0] if args else None
    if not _is_deferred(logits):
        return NotImplemented
    meta = [_meta(item) if isinstance(item, torch.Tensor) else item for item in args]
    like = function(*meta, **kwargs)
    if like is meta[0]:
        return logits
    if not like.dim() or like.dtype != logits.dtype or like.numel() != logits.numel():
        return NotImplemented
    if like.shape[-1] != logits.shape[-1]:
        return NotImplemented
    lead, shape, whole = like.shape[:-1], like.shape, like.is_contiguous()

    def of_plain(plain: torch.Tensor) -> torch.Tensor:
        result = plain.reshape(shape)
        return result.contiguous() if whole else result

    return logits.selected(
        of_plain, lambda rows: rows.reshape(*lead, rows.shape[-1]), like, alias=like._is_view()
    )


def _indexed(function: Callable[..., object], args: Any, kwargs: object) -> Any:
    logits, index = args
    if not _is_deferred(logits):
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    taken, tensors = 0, 0  # dimensions that the index takes
    for item in items:
        if isinstance(item, torch.Tensor) and not _is_deferred(item) and item.dim():
            if item.dtype not in (torch.bool, torch.int64):
                return NotImplemented
            taken += item.dim() if item.dtype == torch.bool else 1
            tensors += 1
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            taken += 1
        elif item is not None and item is not Ellipsis:
            return NotImplemented
    dots = any(item is Ellipsis for item in items)
    last = items[-1] if items else Ellipsis
    whole = _is_whole(last) or (last is Ellipsis and taken < logits.dim())
    if taken > logits.dim() or ((dots or taken == logits.dim()) and not whole):
        return NotImplemented
    if not tensors:
        like = _meta(logits)[index]
    else:  # its shape depends on values, which a later write must not change
        index = tree_map(_owned, index)
        probe = torch.empty((*logits.shape[:-1], 1), dtype=torch.bool, device=logits.device)
        shape = (*probe[index].shape[:-1], logits.shape[-1])
        like = torch.empty(shape, dtype=logits.dtype, device="meta")

    def select(rows: torch.Tensor) -> torch.Tensor:
        return rows[index]

    return logits.selected(select, select, like, alias=not tensors)


def _is_whole(item: object) -> bool:
    return isinstance(item, slice) and item in (slice(None), slice(None, None, 1))


def _along(function: Callable[..., object], args: Any, kwargs: Any) -> Any:
    """Handle functions of one dimension that is not the last: select, narrow, split, ..."""
    logits: Any = args[0] if args else None
    if not _only_first(args, kwargs) or logits.dim() < 2:
        return NotImplemented
    try:
        bound = _signature(function).bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    bound.apply_defaults()
    dims = [bound.arguments[name] for name in ("dim", "dim0", "dim1") if name in bound.arguments]
    last = logits.dim() - 1
    if any(not isinstance(dim, int) or not -last - 1 <= dim <= last for dim in dims):
        return NotImplemented  # torch's own error
    dims = [dim % logits.dim() for dim in dims]
    if last in dims:
        return NotImplemented
    other_args = [
        value
        for name, value in bound.arguments.items()
        if name not in ("self", "dim", "dim0", "dim1", "index_tensor")
    ]
    plain = _PLAIN_ALONG[function.__name__]
    other_args = [_owned(value) for value in other_args]
    call = functools.partial(_call_along, plain, dims, other_args)
    if function.__name__ == "index_select":
        like = torch.empty(
            call(
                torch.empty((*logits.shape[:-1], 1), dtype=torch.bool, device=logits.device)
            ).shape[:-1]
            + (logits.shape[-1],),
            dtype=logits.dtype,
            device="meta",
        )
        return logits.selected(call, call, like, alias=False)
    result = call(_meta(logits))
    if isinstance(result, torch.Tensor):
        return logits.selected(call, call, result, alias=True)

    def part(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: call(tensor)[at]

    return tuple(
        logits.selected(part(at), part(at), item, alias=True) for at, item in enumerate(result)
    )


def _call_along(
    plain: Callable[..., T], dims: list[int], other_args: list[object], tensor: torch.Tensor
) -> T:
    return plain(tensor, dims, other_args)


_PLAIN_ALONG: dict[str, Callable[..., Any]] = {
    "select": lambda t, d, r: torch.select(t, d[0], r[0]),
    "narrow": lambda t, d, r: torch.narrow(t, d[0], *r),
    "split": lambda t, d, r: torch.split(t, r[0], d[0]),
    "chunk": lambda t, d, r: torch.chunk(t, r[0], d[0]),
    "unbind": lambda t, d, r: torch.unbind(t, d[0]),
    "index_select": lambda t, d, r: torch.index_select(t, d[0], r[0]),
    "transpose": lambda t, d, r: torch.transpose(t, *d),
    "__iter__": lambda t, d, r: torch.unbind(t, 0),
}


@functools.cache
def _signature(function: Callable[..., object]) -> inspect.Signature:
    written: dict[str, Callable[..., None]] = {
        "select": lambda self, dim, index: None,
        "narrow": lambda self, dim, start, length: None,
        "split": lambda self, split_size, dim=0: None,
        "chunk": lambda self, chunks, dim=0: None,
        "unbind": lambda self, dim=0: None,
        "index_select": lambda self, dim, index: None,
        "transpose": lambda self, dim0, dim1: None,
        "__iter__": lambda self, dim=0: None,
    }
    return inspect.signature(written[function.__name__])


def _iterated(function: Callable[..., object], args: object, kwargs: object) -> object:
    result = _along(function, args, kwargs)
    return result if result is NotImplemented else iter(result)


def _copied(function: Callable[..., object], args: Any, kwargs: object) -> object:
    if not _only_first(args, kwargs) or len(args) > 1 or kwargs:
        return NotImplemented
    logits = args[0]
    like = _meta(logits)
    if function.__name__ == "detach":
        return logits.selected(_T.detach, lambda rows: rows, like, alias=True, detached=True)
    return logits.selected(_T.clone, lambda rows: rows, like, alias=False)


def _cast(function: Any, args: Any, kwargs: Any) -> Any:
    logits: object = args[0] if args else None
    if not _is_deferred(logits):
        return NotImplemented
    arguments = [_some_rows(item) if _is_deferred(item) else item for item in args[1:]]
    sample = _some_rows(logits)
    result = function(sample, *arguments, **kwargs)
    if not isinstance(result, torch.Tensor):
        return result  # the name of a type
    if result is sample:
        return logits
    if (
        result.device != logits.device
        or not result.is_floating_point()
        or any(map(_is_deferred, args[1:]))
    ):
        return NotImplemented
    other_args = args[1:]  # a closure that held the logits would keep them alive
    dtype = result.dtype
    return logits.step(
        lambda value: value.to(dtype), (logits.program,), result,
        lambda whole: function(whole, *other_args, **kwargs), (logits,), (),
        widens=dtype == accumulator_dtype(logits.dtype),
    )  # fmt: skip


def _elementwise(function: Any, args: Any, kwargs: Any) -> Any:
    """Record a function of elements, with operands that are numbers, vectors over the last
    dimension or tensors over the same rows.
    """
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()) or kwargs.get("inplace"):
        return NotImplemented
    if any(isinstance(value, list | tuple) for value in args):
        return NotImplemented
    ones = [item for item in args if _is_deferred(item)]
    logits = ones[0] if ones else None
    if logits is None:
        return NotImplemented
    inputs, samples, tensors, pending = [], [], [], args
    args = []
    for item in pending:
        if not isinstance(item, torch.Tensor):
            args.append(item)
            inputs.append(item)
            samples.append(item)
            continue
        node: object = item.program if _is_deferred(item) else _operand(item, logits, function)
        if node is None or (_is_deferred(item) and item.shape != logits.shape):
            return NotImplemented
        if isinstance(node, Vector) or (isinstance(node, Operand) and node.rows.shape[-1] == 1):
            item = item.clone()  # a write to it after this must not be seen
            node = _operand(item, logits, function)
        args.append(item)
        inputs.append(node)
        if isinstance(node, Vector):
            samples.append(node.tensor.detach())
        else:
            samples.append(_some_rows(node.rows if isinstance(node, Operand) else item))
        if not _is_deferred(item):
            tensors.append(item)
    step: Any = functools.partial(function, **kwargs) if kwargs else function
    if kwargs:
        step.__name__ = f"{function.__name__} with arguments"
    with torch.no_grad():
        like = step(*samples)
    if like.shape != (0, logits.shape[-1]):
        return NotImplemented
    places = [at for at, item in enumerate(args) if isinstance(item, torch.Tensor)]
    order = [at for at in places if _is_deferred(args[at])] + [
        at for at in places if not _is_deferred(args[at])
    ]

    others = [None if _is_deferred(item) else item for item in args]

    def replay(*values: torch.Tensor) -> torch.Tensor:
        for node in inputs:
            if isinstance(node, Operand):
                node.check()
        arguments: list[Any] = list(others)
        # a materialized tensor is replayed from its parents alone
        for at, value in zip(order, values):
            arguments[at] = value
        return function(*arguments, **kwargs)

    return logits.step(step, tuple(inputs), like, replay, tuple(ones), tuple(tensors))


def _operand(
    tensor: torch.Tensor, logits: torch.Tensor, function: Callable[..., object]
) -> Operand | Vector | None:
    """Return a plain operand of ``function`` of ``logits`` as a node; None for another shape."""
    if tensor.device != logits.device and tensor.dim():
        return None
    if not tensor.dim():
        return Vector(tensor)
    lead, width = tensor.shape[:-1], tensor.shape[-1]
    if width not in (1, logits.shape[-1]) or tensor.dim() > logits.dim():
        return None
    if all(size == 1 for size in lead):
        return Vector(tensor.reshape(width))
    try:
        if torch.broadcast_shapes(lead, logits.shape[:-1]) != logits.shape[:-1]:
            return None
    except RuntimeError:
        return None
    return Operand(tensor.expand(*logits.shape[:-1], width), function.__name__)


def _is_last(dim: object, logits: torch.Tensor) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, logits.dim() - 1)


def _softmax(function: Callable[..., object], args: Any, kwargs: Any) -> Any:
    stacked = function in (F.softmax, F.log_softmax)
    names = ("input", "dim", *(("_stacklevel",) if stacked else ()), "dtype")
    arguments: dict[str, Any] = dict(zip(names, args)) | {
        ("input" if k == "self" else k): v for k, v in kwargs.items()
    }
    logits: object = arguments.get("input")
    dim, dtype = arguments.get("dim"), arguments.get("dtype")
    if not arguments.keys() <= {*names} or not _is_deferred(logits) or not _is_last(dim, logits):
        return NotImplemented
    step = programs.log_softmax if "log" in function.__name__ else _softmax_over_last
    like = step(_some_rows(logits), dtype)
    return logits.step(
        step, (logits.program, dtype), like, lambda value: step(value, dtype), (logits,), ()
    )


def _softmax_over_last(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.softmax(value, -1, dtype)


def _by_head(
    logits: DeferredOutput, compute: Callable[[], torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return ``compute()`` [n] in ``shape``, with gradients if those of ``logits`` are recorded."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits._records):
        return compute().reshape(shape)


def _reduced(function: Any, args: Any, kwargs: Any) -> Any:
    """Handle reductions over the last dimension that return one tensor."""
    if not _only_first(args, kwargs):
        return NotImplemented
    logits = args[0]
    arguments = dict(kwargs)
    names = ("dim", "keepdim")
    for name, value in zip(names, args[1:]):
        arguments[name] = value
    if len(args) > 3 or not set(arguments) <= {"dim", "keepdim", "dtype"}:
        return NotImplemented
    dim = arguments.pop("dim", None)
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    if not _is_last(dim, logits):
        return NotImplemented

    lead = logits.shape[:-1] + ((1,) if arguments.get("keepdim") else ())
    form = heads.head_of(logits.program, logits._records)
    if form is not None and set(arguments) <= {"keepdim"}:
        axis = form.call.call.axis
        if function.__name__ == "logsumexp":
            result = _by_head(logits, lambda: heads.logsumexps(form), lead).to(logits.dtype)
            return logits.used(result, function, args, kwargs)
        if function.__name__ == "argmax" and axis is not None and form.is_plain:
            return _by_head(logits, lambda: heads.places_of_largest(form, axis), lead)

    def reduce(rows: torch.Tensor) -> torch.Tensor:
        return function(rows, -1, **arguments)

    return logits.used(logits.reduced(reduce), function, args, kwargs)


def _max(function: Callable[..., object], args: Any, kwargs: Any) -> object:
    """Handle max and min over the last dimension: values and their places."""
    arg = {"max": torch.argmax, "min": torch.argmin}[function.__name__]
    indices = _reduced(arg, args, kwargs)
    if indices is NotImplemented or len(args) + len(kwargs) < 2:
        return NotImplemented
    keeps_dim = indices.dim() == args[0].dim()
    index = indices if keeps_dim else indices[..., None]
    values = args[0].gather(-1, index)
    kind = getattr(torch.return_types, function.__name__)
    return kind((values if keeps_dim else values[..., 0], indices))


def _gathered(function: Callable[..., object], args: Any, kwargs: Any) -> Any:
    arguments: dict[str, Any] = dict(zip(("input", "dim", "index"), args)) | {
        ("input" if k == "self" else k): v for k, v in kwargs.items()
    }
    logits: object = arguments.get("input")
    dim: Any = arguments.get("dim")
    index: Any = arguments.get("index")
    if (
        set(arguments) != {"input", "dim", "index"}
        or not _is_deferred(logits)
        or _is_deferred(index)
    ):
        return NotImplemented
    if not _is_last(dim, logits) or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    if index.device != logits.device or not _in_range(index, logits.shape[-1]):
        return NotImplemented
    form = heads.head_in_log_softmax(logits.program, logits._records)
    if form is not None and index.shape[-1] == 1:
        labels = index.reshape(-1)
        result = _by_head(logits, lambda: heads.log_probabilities(form, labels), index.shape)
        result = result.to(logits.dtype)
    else:
        result = logits.reduced(lambda rows, places: rows.gather(-1, places), index)
    return logits.used(result, function, args, kwargs)


def _in_range(index: torch.Tensor, width: int) -> bool:
    """Return whether indices on a host are valid; a device reports them itself."""
    if index.dtype != torch.int64:
        return False
    if index.device.type != "cpu" or not index.numel():
        return True
    return bool(((index >= 0) & (index < width)).all())


_SHAPES = "view reshape flatten unflatten squeeze unsqueeze contiguous view_as reshape_as"
_ALONG = "select narrow split chunk unbind index_select transpose"
_CASTS = "to float half bfloat16 double type type_as"
_ELEMENTS = (
    "add sub mul div true_divide multiply divide subtract __add__ __radd__ __sub__ __rsub__ "
    "__mul__ __rmul__ __truediv__ __rtruediv__ __neg__ neg tanh exp log sigmoid square abs "
    "sqrt rsqrt pow __pow__ relu silu gelu softplus masked_fill clamp erf"
)
_REDUCTIONS = "sum mean logsumexp amax amin argmax argmin"

for _names, _homes, _handler in (
    (_SHAPES, (_T, torch), _reshaped),
    ("__getitem__", (_T,), _indexed),
    (_ALONG, (_T, torch), _along),
    ("__iter__", (_T,), _iterated),
    ("clone detach", (_T, torch), _copied),
    (_CASTS, (_T,), _cast),
    (_ELEMENTS, (_T, torch, F), _elementwise),
    ("softmax log_softmax", (_T, torch, F), _softmax),
    (_REDUCTIONS, (_T, torch), _reduced),
    ("max min", (_T, torch), _max),
    ("gather", (_T, torch), _gathered),
):
    HANDLERS.update(dict.fromkeys(named(_names, *_homes), _handler))
