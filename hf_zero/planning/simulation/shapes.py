"""Results of operations on the meta device, kept by the shapes of their operands: torch computes
many of them in Python, and the blocks of a model ask for the same ones again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

# shape, strides and dtype of a new tensor
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_VALUES = (
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def tensors_of(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operation, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


class ShapeCache:
    """Calls operations, those of torch that make new tensors only once for the same shapes."""

    def __init__(self) -> None:
        self._makes_new: dict[object, bool] = {}
        # by operation and arguments: the new tensors, one or several; None: not only new tensors
        self._made: dict[object, _Made | list[_Made] | None] = {}

    def __call__(
        self, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        if func not in self._makes_new:
            self._makes_new[func] = _makes_new(func)
        key = self._makes_new[func] and (_key(args), _key(kwargs.values()))
        if not key or None in key:
            return func(*args, **kwargs)
        call = (func, *key, *kwargs)
        if call not in self._made:
            out = func(*args, **kwargs)
            self._made[call] = _described(out, args)
            return out
        description = self._made[call]
        if description is None:
            return func(*args, **kwargs)
        if isinstance(description, list):
            return tuple(map(_empty, description))
        return _empty(description)


def _makes_new(func: Any) -> bool:
    """Return whether ``func`` changes no argument and returns no view, by its schema."""
    schema = func._schema
    named = (*schema.arguments, *schema.returns)
    return func.namespace == "aten" and all(argument.alias_info is None for argument in named)


def _key(values: Iterable[object]) -> tuple[object, ...] | None:
    """Return an identifier of the shapes of tensors and of other values; None if there is none."""
    parts: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_meta or value.is_complex():
                return None
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            inside = _key(value)
            if inside is None:
                return None
            parts.append((type(value), inside))
        elif isinstance(value, _VALUES):
            parts.append((type(value), value))  # 1 and 1.0 are equal
        else:
            return None
    return tuple(parts)


def _described(out: object, args: Iterable[object]) -> _Made | list[_Made] | None:
    """Return the description of the new tensors ``out``; None if they are something else."""
    if isinstance(out, tuple):
        shapes = [one for one in (_described(v, args) for v in out) if isinstance(one, tuple)]
        return shapes if shapes and len(shapes) == len(out) else None
    if type(out) is not torch.Tensor or not out.is_meta or out.is_complex():
        return None
    storage = out.untyped_storage()
    storages = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
    description = tuple(out.shape), out.stride(), out.dtype
    if (
        storage._cdata in storages
        or storage.nbytes() != _empty(description).untyped_storage().nbytes()
    ):
        return None
    return description


def _empty(described: _Made) -> torch.Tensor:
    shape, stride, dtype = described
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
