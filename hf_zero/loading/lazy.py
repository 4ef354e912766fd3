"""A tensor that a model loader can rename, cut, join and cast before it is read.

:class:`LazyTensor` is a wrapper subclass: every operation on it arrives in ``__torch_dispatch__``
and extends an expression (expressions.py) instead of touching memory. Outwardly it is contiguous,
even if it is a view; a view of one under initialization has its own strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from hf_zero.errors import PartitionError
from hf_zero.loading.expressions import (
    Cast,
    Computed,
    Expression,
    Filled,
    InMemory,
    Joined,
    Strided,
    strided_like,
)
from hf_zero.zero.layout.initial_values import without_repeats

aten = torch.ops.aten
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_NEW = {
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


class LazyTensor(torch.Tensor):
    """A tensor whose values are defined by ``expression`` and not yet read.

    One under initialization may be read, and written in place. PartitionError is raised for other
    changes of it, as by ``out=`` or ``t_``, and for writing into one from a file.
    """

    expression: Expression

    @staticmethod
    def __new__(cls, expression: Expression) -> LazyTensor:
        layout: dict[str, Any] = {}
        if isinstance(expression, Strided) and isinstance(expression.root, Filled):
            layout = {"strides": expression.strides, "storage_offset": expression.offset}
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, expression.shape, dtype=expression.dtype, device=torch.device("cpu"), **layout
        )
        tensor.expression = expression
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, LazyTensor):  # not copied: the memory stays that of both
            value = LazyTensor(_shared(value.detach().cpu()))
        SET_DATA(self, value)
        self.expression = value.expression

    def read_whole(self) -> torch.Tensor:
        """Read the values now and return a plain CPU tensor, also while models are built."""
        with _disable_current_modes():
            return self.expression.whole()

    def in_memory(self) -> torch.Tensor:
        """Read the values now and return a plain CPU tensor; writes to it are those to a tensor
        under initialization.
        """
        if not is_filled(self):
            return self.read_whole()
        with _disable_current_modes():
            root, view = _meta(self.expression)
            memory: torch.Tensor = root.in_memory()  # type: ignore[attr-defined]
            offset = memory.storage_offset() + int(view.storage_offset())
            return memory.as_strided(view.shape, view.stride(), offset)

    # Code outside of torch asks for memory: the whole values are read now.

    def numpy(self, *args: object, **kwargs: Any) -> Any:
        return self.in_memory().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.read_whole().tolist()

    def __dlpack__(self, **kwargs: Any) -> object:
        return self.in_memory().__dlpack__(**kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        decomposed = func.decompose(*args, **kwargs)  # under inference_mode torch does not
        if decomposed is not NotImplemented:
            return decomposed
        if func is aten.clone.default:
            return LazyTensor(_copied(args[0].expression))
        if func in _SAME:
            return LazyTensor(args[0].expression)
        if func is aten._to_copy.default:
            return _converted(args[0], **kwargs)
        if func is aten.cat.default:
            return _joined(*args, **kwargs)
        if func is aten.stack.default:
            return _stacked(*args, **kwargs)
        if func in _NEW:  # a real tensor of its own, to be written into
            return func(
                _shape_of(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or "cpu"}
            )
        if func is aten.equal.default:
            return _same_values(*args)
        if func._schema.is_mutable:
            return _changed(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags or not _is_view(func):
            return _computed(func, args, kwargs)
        return _viewed(func, args, kwargs)


def _changed(func: Any, args: Any, kwargs: Any) -> object:
    """Record a write into a tensor under initialization. Raise PartitionError for other changes of
    one, and for a write into a tensor of a file.
    """
    written = _written(func, args, kwargs)
    if written is None:
        return _computed_now(func, args, kwargs)
    if not is_filled(written):
        raise PartitionError(
            f"{func} writes into a weight of shape {tuple(written.shape)} that is still in its "
            "file; load this model with zero stage 2, or "
            "outside the ZeRO-3 configuration, and shard it at initialize"
        )
    if written is args[0] and _is_in_place(func):
        return _filled(func, args, kwargs)
    if func is aten.set_.source_Tensor:
        if _expression(args[1]).place != written.expression.place:
            written.data = args[1]
        return written
    if written is args[0] and _keeps_layout(func, args, kwargs):
        return written
    raise PartitionError(
        f"{func} cannot change a weight of shape {tuple(written.shape)} while its model is built "
        "in shards; write its values in place, as by weight.copy_(values), or set weight.data = "
        "values"
    )


def _written(func: Any, args: Any, kwargs: Any) -> LazyTensor | None:
    """Return the lazy tensor that ``func`` writes into; None if it writes into none."""
    named = zip((argument.name for argument in func._schema.arguments), args)
    arguments = {**dict(named), **kwargs}
    writes = [
        arguments.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return next((value for value in tree_flatten(writes)[0] if isinstance(value, LazyTensor)), None)


def _is_in_place(func: Any) -> bool:
    """Return whether ``func`` writes elements of its first argument, and changes nothing else."""
    writes = [argument.is_write for argument in func._schema.arguments]
    return torch.Tag.inplace_view not in func.tags and writes == [True] + [False] * len(writes[1:])


def _keeps_layout(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether ``func``, which changes nothing else, leaves its first argument the shape and
    strides that it has: ``resize_`` to the same shape.
    """
    if torch.Tag.inplace_view not in func.tags:
        return False
    before = _meta(args[0].expression)[1]
    after = before.detach()
    try:
        func(after, *tree_map(_shape_of, args[1:]), **tree_map(_shape_of, kwargs))
    except RuntimeError:  # a storage in memory
        return False
    layouts = [(view.shape, view.stride(), view.storage_offset()) for view in (before, after)]
    return layouts[0] == layouts[1]


def _is_view(func: Any) -> bool:
    return func.is_view or func in (
        aten._unsafe_view.default,
        aten.unsafe_chunk.default,
        aten.unsafe_split.Tensor,
    )


def is_filled(tensor: object) -> bool:
    """Return whether ``tensor`` is a lazy tensor under initialization, or a view of one."""
    return isinstance(tensor, LazyTensor) and isinstance(_root(tensor.expression), Filled)


def _root(expression: Expression) -> Expression:
    return expression.root if isinstance(expression, Strided) else expression


def _filled(func: Callable[..., object], args: Any, kwargs: Any) -> LazyTensor:
    """Record a write into a tensor under initialization."""
    target, others = args[0], args[1:]
    if (
        func is aten.copy_.default
        and isinstance(others[0], LazyTensor)
        and others[0].expression.place == target.expression.place
    ):
        return target  # a copy onto itself, the last operation of ``weight[0] *= 2``
    return fill(target, func, *others, **kwargs)


def fill(
    target: LazyTensor, do: Callable[..., object], /, *args: object, **kwargs: object
) -> LazyTensor:
    """Record ``do``, an in-place operation, to be applied to ``target``, a tensor under
    initialization, and to the arguments as they are now, when it is read. Returns ``target``.

    A generator among the arguments advances now.
    """
    root, meta = _meta(target.expression)
    assert isinstance(root, Filled)
    given = args, kwargs
    if root.memory is not None:
        args, kwargs = tree_map(_real, given)
        offset = root.memory.storage_offset() + int(meta.storage_offset())
        do(root.memory.as_strided(meta.shape, meta.stride(), offset), *args, **kwargs)
        return target
    kept = tree_map(lambda value: _real(_kept(value)), given)
    if any(isinstance(value, torch.Generator) for value in tree_flatten(given)[0]):
        do(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype), *args, **kwargs)

    def replay(view: torch.Tensor) -> None:
        args, kwargs = tree_map(_from_its_state, kept)
        do(view, *args, **kwargs)

    root.write(meta.shape, meta.stride(), int(meta.storage_offset()), replay)
    return target


def _meta(expression: Expression) -> tuple[Expression, torch.Tensor]:
    """Return the expression that holds the elements, and a meta tensor that stands for the view."""
    if isinstance(expression, Strided):
        elements = torch.empty(expression.root.numel, dtype=expression.dtype, device="meta")
        return expression.root, elements.as_strided(
            expression.shape, expression.strides, expression.offset
        )
    return expression, torch.empty(expression.shape, dtype=expression.dtype, device="meta")


def _viewed(func: Callable[..., object], args: Any, kwargs: Any) -> object:
    expression = args[0].expression
    alone = expression, torch.empty(expression.shape, dtype=expression.dtype, device="meta")
    outwardly_contiguous = not is_filled(args[0])
    # The caller's arguments of as_strided refer to the strides that the tensor reports.
    as_strided = func is aten.as_strided.default
    root, meta = alone if as_strided and outwardly_contiguous else _meta(expression)
    try:
        result = func(meta, *args[1:], **kwargs)
    except RuntimeError:
        if not outwardly_contiguous:
            raise
        # The view cannot take this shape without a copy: treat it as the root of the next view.
        root, meta = alone
        result = func(meta, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor) and (
        result.dtype != expression.dtype or result.is_conj() or result.is_neg()
    ):
        if not outwardly_contiguous:
            return func(args[0].in_memory(), *args[1:], **kwargs)
        return _computed(func, args, kwargs)  # a view with other element values
    return tree_map(
        lambda value: (
            LazyTensor(strided_like(root, value)) if isinstance(value, torch.Tensor) else value
        ),
        result,
    )


def _converted(
    tensor: LazyTensor, dtype: torch.dtype | None = None, device: Any = None, **unused: object
) -> LazyTensor:
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        return tensor.read_whole().to(device, dtype)  # type: ignore[return-value]
    expression = tensor.expression
    if not isinstance(_root(expression), Filled):
        return LazyTensor(
            expression if dtype in (None, expression.dtype) else Cast(expression, dtype)
        )
    new = _copied(expression)
    return LazyTensor(
        new if dtype in (None, new.dtype) else Filled(new.shape, dtype, Cast(new, dtype))
    )


def _copied(expression: Expression) -> Expression:
    """Return a separate expression with the values that ``expression`` has now; if its values
    cannot change, ``expression`` itself.
    """
    root = _root(expression)
    if not isinstance(root, Filled):
        return expression
    copied = root.copy()
    if expression is root:
        return copied
    assert isinstance(expression, Strided)
    return Filled(
        expression.shape,
        expression.dtype,
        Strided(copied, expression.shape, expression.strides, expression.offset),
    )


def _expression(tensor: torch.Tensor) -> Expression:
    return tensor.expression if isinstance(tensor, LazyTensor) else InMemory(tensor)


def _shared(memory: torch.Tensor) -> Expression:
    """Return an expression whose writes go to ``memory``."""
    if memory.is_contiguous():
        return Filled(memory.shape, memory.dtype, memory=memory)
    # all elements from the first one on to the last
    span = 1 + sum((size - 1) * step for size, step in zip(memory.shape, memory.stride()))
    elements = memory.as_strided((span,), (1,))
    return Strided(
        Filled(elements.shape, memory.dtype, memory=elements), memory.shape, memory.stride(), 0
    )


def _joined(tensors: Any, dim: int = 0) -> LazyTensor:
    # on meta tensors, to raise if the shapes do not fit
    joined = torch.cat([_shape_of(tensor) for tensor in tensors], dim)
    # torch.cat skips tensors of shape (0,)
    parts = [
        _copied(_expression(_kept(tensor)))
        for tensor in tensors
        if tensor.shape != (0,) or joined.dim() == 1
    ]
    cast = [part if part.dtype == joined.dtype else Cast(part, joined.dtype) for part in parts]
    joined_expression: Expression = Joined(cast, dim % joined.dim())
    return LazyTensor(
        Filled(joined_expression.shape, joined_expression.dtype, joined_expression)
        if any(isinstance(_root(part), Filled) for part in parts)
        else joined_expression
    )


def _stacked(tensors: Any, dim: int = 0) -> object:
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim % (tensors[0].dim() + 1))


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    first, second = _expression(one), _expression(other)
    return first is second or torch.equal(first.whole(), second.whole())


def _computed(func: Any, args: Any, kwargs: object) -> object:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _computed_now(func, args, kwargs)  # each read would draw other numbers
    if any(map(is_filled, tree_flatten((args, kwargs))[0])):
        if func is aten.constant_pad_nd.default and not any(args[1]):
            return LazyTensor(_copied(args[0].expression))
        return _computed_now(func, args, kwargs)  # later writes would change the result
    try:
        shapes = func(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs))
    except RuntimeError:  # the shape of the result, or the result itself, depends on the values
        return _computed_now(func, args, kwargs)
    if isinstance(shapes, torch.Tensor):
        args, kwargs = tree_map(_kept, (args, kwargs))
        return LazyTensor(
            Computed(
                shapes.shape, shapes.dtype, lambda: _computed_now(func, args, kwargs), str(func)
            )
        )
    return _computed_now(func, args, kwargs)


def _computed_now(func: Callable[..., object], args: object, kwargs: object) -> Any:
    return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _real(value: object) -> object:
    return value.read_whole() if isinstance(value, LazyTensor) else value


def _kept(value: Any) -> Any:
    """Return a tensor in memory, or a generator, as it is now, whatever is done with it later. Lazy
    tensors and other values stay as they are.
    """
    if isinstance(value, LazyTensor) or not isinstance(value, torch.Tensor):
        return _from_its_state(value)
    value = value.detach()
    if value.layout is not torch.strided:
        return value.clone()
    return without_repeats(value).clone().expand(value.shape)


def _from_its_state(value: Any) -> Any:
    """Return another generator with the state of a generator; any other value as it is."""
    return value.clone_state() if isinstance(value, torch.Generator) else value


def _shape_of(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
