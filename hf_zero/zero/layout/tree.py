"""Tensors inside arguments and results of modules: tuples, lists, dicts, dataclasses, and objects
that carry tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

Visit = Callable[[torch.Tensor], torch.Tensor]
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
# exact types of such values; a subclass may hold anything
_PLAIN = frozenset(_ATOMS)


def transformed() -> bool:
    """Return whether a torch.func transform with its own graphs (grad, jvp, ...) is active.

    ``vmap`` has none.
    """
    if not torch._C._are_functorch_transforms_active():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() != vmap for interpreter in stack)


def map_tensors(value: object, visit: Visit, in_place: bool = False) -> Any:
    """Return ``value`` with every tensor replaced by ``visit(tensor)``; containers without a change
    are returned as they are.

    ``in_place`` modifies lists and plain dicts themselves: a caller may read what a module appends
    to them.
    """
    if isinstance(value, torch.Tensor):
        return visit(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, tuple):
        items = [map_tensors(item, visit, in_place) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        items = [map_tensors(item, visit, in_place) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        filled = value if in_place and type(value) is list else copy.copy(value)
        filled[:] = items
        return filled
    if isinstance(value, (dict, UserDict)):
        changed = {key: map_tensors(item, visit, in_place) for key, item in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        if type(value) is dict and in_place:
            value.update(changed)
            return value
        if type(value) is dict:
            return changed
        # A copy that is then filled: transformers' ModelOutput may hold keys and attributes that
        # are no fields.
        copied = copy.copy(value)
        for key, item in changed.items():
            copied[key] = item
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            f.name: map_tensors(getattr(value, f.name), visit, in_place)
            for f in dataclasses.fields(value)
            if f.init
        }
        if all(changed[name] is getattr(value, name) for name in changed):
            return value
        return dataclasses.replace(value, **changed)
    return value


def form_of(value: object) -> Hashable | None:
    """Return what two arguments of a module that differ only in the values of their tensors have in
    common: structure, shapes, dtypes and all other values. None if a part is none of tensors,
    containers and plain values.
    """
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if type(value) in _PLAIN:
        return type(value), value  # 1 and True are equal
    if isinstance(value, (tuple, list)):
        parts = [form_of(item) for item in value]
    elif isinstance(value, dict):
        parts = [form_of(item) for item in value.values()]
        parts.append((str, tuple(value)))
    else:
        return None
    return None if None in parts else (type(value), tuple(parts))


def is_cache(value: object) -> bool:
    """Return whether ``value`` is state that a decoder continues from: a cache of keys and values,
    or of recurrent states, which can be reset, or a tuple of the keys and values of each layer.
    """
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(item, tuple) for item in value)
    return callable(getattr(value, "reset", None))


def requiring_grad(args: tuple[object, ...], kwargs: dict[str, object]) -> dict[int, torch.Tensor]:
    """Return the tensors in a module's arguments that require grad, by id. Fast: runs in each call
    of each block.
    """
    tensors = {}
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                tensors[id(value)] = value
        elif type(value) not in _PLAIN:
            tensors.update(
                (id(tensor), tensor) for tensor in tensors_in(value) if tensor.requires_grad
            )
    return tensors


def with_replaced(
    args: tuple[object, ...], kwargs: dict[str, object], replaced: Mapping[int, torch.Tensor]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with tensors replaced by id from ``replaced``; lists and plain dicts in
    them are modified in place.
    """

    def given(value: object) -> object:
        if type(value) in _PLAIN:
            return value
        return map_tensors(value, lambda tensor: replaced.get(id(tensor), tensor), in_place=True)

    # tensors first for speed: runs in each call of each block
    values = []
    for value in args:
        is_tensor = isinstance(value, torch.Tensor)
        values.append(replaced.get(id(value), value) if is_tensor else given(value))
    return tuple(values), {key: given(value) for key, value in kwargs.items()} if kwargs else {}


def tensors_in(
    value: object, unknown: list[object] | None = None, depth: int = 0
) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``.

    Objects of unknown classes are searched one level deep and appended to ``unknown``.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _ATOMS):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, unknown, depth)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, unknown, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), unknown, depth)
    elif depth < 1 and not callable(value):
        if unknown is not None:
            unknown.append(value)
        yield from tensors_in(getattr(value, "__dict__", None) or (), unknown, depth + 1)
