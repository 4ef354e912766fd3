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
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hf_zero.ops.chunked_head import accumulator_dtype
from hf_zero.ops.deferred import heads, programs
from hf_zero.ops.deferred.facts import named
from hf_zero.ops.deferred.programs import Operand, Vector
from hf_zero.ops.deferred.tensor import HANDLERS, DeferredOutput, Derivation

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
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


def _meta_of_selection(
    logits: DeferredOutput, select: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a meta tensor like the rows that ``select`` takes, whose number depends on values."""
    probe = torch.empty((*logits.shape[:-1], 1), dtype=torch.bool, device=logits.device)
    shape = (*select(probe).shape[:-1], logits.shape[-1])
    return torch.empty(shape, dtype=logits.dtype, device="meta")


def _only_first(args: Args, kwargs: Kwargs) -> bool:
    """Return whether the first argument alone is deferred."""
    return _is_deferred(args[0] if args else None) and not any(
        _is_deferred(item) for item in (*args[1:], *kwargs.values())
    )


def _reshaped(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
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


def _indexed(function: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
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
    index = tree_map(_owned, index)  # a later write to a tensor in it must not be seen

    def select(rows: torch.Tensor) -> torch.Tensor:
        return rows[index]

    like = _meta_of_selection(logits, select) if tensors else select(_meta(logits))
    return logits.selected(select, select, like, alias=not tensors)


def _is_whole(item: object) -> bool:
    return isinstance(item, slice) and item in (slice(None), slice(None, None, 1))


def _along(function: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
    """Handle functions of one dimension that is not the last: select, narrow, split, ..."""
    logits: Any = args[0] if args else None
    if not _only_first(args, kwargs) or logits.dim() < 2:
        return NotImplemented
    name = function.__name__
    try:
        bound = _SIGNATURES[name].bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    bound.apply_defaults()
    settings = {key: _owned(value) for key, value in bound.arguments.items() if key != "self"}
    dims = {key: settings[key] for key in ("dim", "dim0", "dim1") if key in settings}
    for key, dim in dims.items():
        if not isinstance(dim, int) or not -logits.dim() <= dim < logits.dim():
            return NotImplemented  # torch's own error
        settings[key] = dim % logits.dim()
        if settings[key] == logits.dim() - 1:
            return NotImplemented
    call = functools.partial(_PLAIN_ALONG[name], **settings)
    if name == "index_select":
        return logits.selected(call, call, _meta_of_selection(logits, call), alias=False)
    result = call(_meta(logits))
    if isinstance(result, torch.Tensor):
        return logits.selected(call, call, result, alias=True)

    def part(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: call(tensor)[at]

    return tuple(
        logits.selected(part(at), part(at), item, alias=True) for at, item in enumerate(result)
    )


# the functions that :func:`_along` handles, with torch's names of their arguments
_PLAIN_ALONG: dict[str, Callable[..., Any]] = {
    "select": lambda self, dim, index: torch.select(self, dim, index),
    "narrow": lambda self, dim, start, length: torch.narrow(self, dim, start, length),
    "split": lambda self, split_size, dim=0: torch.split(self, split_size, dim),
    "chunk": lambda self, chunks, dim=0: torch.chunk(self, chunks, dim),
    "unbind": lambda self, dim=0: torch.unbind(self, dim),
    "index_select": lambda self, dim, index: torch.index_select(self, dim, index),
    "transpose": lambda self, dim0, dim1: torch.transpose(self, dim0, dim1),
    "__iter__": lambda self, dim=0: torch.unbind(self, dim),
}
_SIGNATURES = {name: inspect.signature(plain) for name, plain in _PLAIN_ALONG.items()}


def _iterated(function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    result = _along(function, args, kwargs)
    return result if result is NotImplemented else iter(result)


def _copied(function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    if not _only_first(args, kwargs) or len(args) > 1 or kwargs:
        return NotImplemented
    logits = args[0]
    like = _meta(logits)
    if function.__name__ == "detach":
        return logits.selected(_T.detach, lambda rows: rows, like, alias=True, detached=True)
    return logits.selected(_T.clone, lambda rows: rows, like, alias=False)


def _cast(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
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
        lambda value: value.to(dtype),
        (logits.program,),
        result,
        Derivation(lambda whole: function(whole, *other_args, **kwargs), (logits,), (logits,)),
        widens=dtype == accumulator_dtype(logits.dtype),
    )


class _Argument(NamedTuple):
    """An argument of a recorded function, its node (numbers are their own), and a sample of it
    without rows.
    """

    value: Any
    node: Any
    sample: Any


def _elementwise(function: Callable[..., torch.Tensor], args: Args, kwargs: Kwargs) -> Any:
    """Record a function of elements, with operands that are numbers, vectors over the last
    dimension or tensors over the same rows.
    """
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()) or kwargs.get("inplace"):
        return NotImplemented
    if any(isinstance(value, list | tuple) for value in args):
        return NotImplemented
    deferred = tuple(item for item in args if _is_deferred(item))
    if not deferred or any(item.shape != deferred[0].shape for item in deferred):
        return NotImplemented
    logits = deferred[0]
    arguments = list[_Argument]()
    for item in args:
        argument = _argument(item, logits, function)
        if argument is None:
            return NotImplemented
        arguments.append(argument)
    step: Any = functools.partial(function, **kwargs) if kwargs else function
    if kwargs:
        step.__name__ = f"{function.__name__} with arguments"
    with torch.no_grad():
        like = step(*(argument.sample for argument in arguments))
    if like.shape != (0, logits.shape[-1]):
        return NotImplemented
    nodes = tuple(argument.node for argument in arguments)
    operands = [node for node in nodes if isinstance(node, Operand)]
    # without the logits, which a closure would keep alive
    values = [None if _is_deferred(argument.value) else argument.value for argument in arguments]
    deferred_at = [at for at, item in enumerate(args) if _is_deferred(item)]
    tensors_at = [at for at, value in enumerate(values) if isinstance(value, torch.Tensor)]
    tensors = tuple(value for value in values if isinstance(value, torch.Tensor))

    def replay(*replayed: torch.Tensor) -> torch.Tensor:
        for operand in operands:
            operand.check()
        filled = list(values)
        # a materialized tensor is replayed from its parents alone
        for at, tensor in zip((*deferred_at, *tensors_at), replayed):
            filled[at] = tensor
        return function(*filled, **kwargs)

    return logits.step(step, nodes, like, Derivation(replay, (*deferred, *tensors), deferred))


def _argument(
    item: object, logits: torch.Tensor, function: Callable[..., object]
) -> _Argument | None:
    """Return ``item``, an argument of ``function`` of ``logits``; None for an operand of another
    shape.
    """
    if _is_deferred(item):
        return _Argument(item, item.program, _some_rows(item))
    if not isinstance(item, torch.Tensor):
        return _Argument(item, item, item)
    node = _operand(item, logits, function)
    if isinstance(node, Vector) or (node is not None and node.rows.shape[-1] == 1):
        item = item.clone()  # a write to it after this must not be seen
        node = _operand(item, logits, function)
    if node is None:
        return None
    sample = node.tensor.detach() if isinstance(node, Vector) else _some_rows(node.rows)
    return _Argument(item, node, sample)


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


def _softmax(function: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
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
    derivation = Derivation(lambda value: step(value, dtype), (logits,), (logits,))
    return logits.step(step, (logits.program, dtype), like, derivation)


def _softmax_over_last(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.softmax(value, -1, dtype)


def _by_head(
    logits: DeferredOutput, compute: Callable[[], torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return ``compute()`` [n] in ``shape``, with gradients if those of ``logits`` are recorded."""
    with logits.recording():
        return compute().reshape(shape)


def _reduced(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Handle reductions over the last dimension that return one tensor."""
    if not _only_first(args, kwargs):
        return NotImplemented
    logits = args[0]
    arguments = kwargs | dict(zip(("dim", "keepdim"), args[1:]))
    if len(args) > 3 or not set(arguments) <= {"dim", "keepdim", "dtype"}:
        return NotImplemented
    dim = arguments.pop("dim", None)
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    if not _is_last(dim, logits):
        return NotImplemented

    lead = logits.shape[:-1] + ((1,) if arguments.get("keepdim") else ())
    form = heads.head_of(logits.program, logits.records)
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


def _max(function: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
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


def _gathered(function: Callable[..., object], args: Args, kwargs: Kwargs) -> Any:
    arguments: dict[str, Any] = dict(zip(("input", "dim", "index"), args)) | {
        ("input" if k == "self" else k): v for k, v in kwargs.items()
    }
    logits: object = arguments.get("input")
    dim: Any = arguments.get("dim")
    index: Any = arguments.get("index")
    if set(arguments) != {"input", "dim", "index"}:
        return NotImplemented
    if not _is_deferred(logits) or _is_deferred(index):
        return NotImplemented
    if not _is_last(dim, logits) or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    if index.device != logits.device or not _in_range(index, logits.shape[-1]):
        return NotImplemented
    form = heads.head_in_log_softmax(logits.program, logits.records)
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
    (" ".join(_PLAIN_ALONG), (_T, torch), _along),
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
