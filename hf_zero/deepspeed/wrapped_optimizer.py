"""The attribute ``optimizer.optimizer``, which DeepSpeed's optimizers have: the one they wrap."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch


class _Absent:
    """An attribute that instances lack, whatever their ``__dict__`` holds: with ``__set__`` it is
    a data descriptor, which Python asks before it looks into the ``__dict__``.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(f"an unwrapped optimizer has no attribute {self._name!r}")

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"an unwrapped optimizer has no attribute {self._name!r}")


def show_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` an attribute ``optimizer``, as DeepSpeed's optimizers have for the one
    that they wrap: a view.

    The view equals ``optimizer`` and shares all of its attributes but this one: libraries unwrap by
    ``while hasattr(optimizer, "optimizer")``. An attribute that a script's own class has stays.
    """
    if hasattr(optimizer, "optimizer"):
        return
    base = type(optimizer)

    def equals(view: object, other: object) -> bool:
        return view is other or other is owner()

    owner = weakref.ref(optimizer)
    identity = hash(optimizer)
    members = {
        "optimizer": _Absent(),
        "__eq__": equals,
        "__hash__": lambda view: identity,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    cls = types.new_class(base.__name__, (base,), {}, lambda body: body.update(members))
    view: Any = object.__new__(cls)
    view.__dict__ = vars(optimizer)
    vars(optimizer)["optimizer"] = view


def hide_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`show_wrapped`. The cycle of the view and the attributes that it shares would keep
    the state of ``optimizer`` until a garbage collection.
    """
    shown = vars(optimizer).get("optimizer")
    if getattr(shown, "__dict__", None) is vars(optimizer):
        del vars(optimizer)["optimizer"]
