"""``deepspeed.utils.instrument_w_nvtx``, and attributes by dotted names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hf_zero.deepspeed.accelerator import get_accelerator

F = TypeVar("F", bound=Callable[..., Any])


def instrument_w_nvtx(func: F) -> F:
    """``func`` as a range of its name in a profile of the device."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return call  # type: ignore[return-value]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """``model.a.b`` for "a.b"."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """``model.a.b = module`` for "a.b"."""
    place, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, place) if place else model, name, module)
