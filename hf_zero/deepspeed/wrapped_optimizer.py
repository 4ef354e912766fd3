"""The attribute ``optimizer.optimizer``, by which DeepSpeed's optimizers have what they wrap."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch


class _Absent:
    """An attribute that instances lack, whatever their ``__dict__`` holds."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(self._name)

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(self._name)


def show_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the attribute of that name, by which DeepSpeed's have what they wrap.

    It equals ``optimizer`` and shares all of its attributes but this one: libraries unwrap by
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
    """Undo :func:`show_wrapped`, whose cycle would keep ``optimizer`` alive."""
    shown = vars(optimizer).get("optimizer")
    if getattr(shown, "__dict__", None) is vars(optimizer):
        del vars(optimizer)["optimizer"]
