"""Outputs of a fused head whose logits are computed when they are read.

A training forward with labels needs no logits, but a script may: for an accuracy next to the loss,
or a loss of its own in ``Trainer.compute_loss``. ``outputs.logits`` then runs the head on the
hidden states of the loss, with gradients. The outputs have no logits as a key, in a tuple, or in a
copy (a flattened and rebuilt pytree).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MAKER = "_hf_zero_make_logits"


def with_late_logits(outputs: Any, make: Callable[[], Any]) -> Any:
    """Return ``outputs``, an instance of a ModelOutput without logits, whose attribute ``logits``
    calls ``make()`` once, on demand.
    """
    kind: Callable[..., Any] = type(outputs)  # mypy considers a type unhashable
    outputs.__class__ = _kind(kind)
    outputs.__dict__[MAKER] = make
    return outputs


@functools.cache
def _kind(kind: Callable[..., Any]) -> Any:
    """Return the subclass of ``kind`` that computes logits on demand, under the same name."""
    return type(
        kind.__name__,
        (kind,),  # type: ignore[arg-type]
        {
            "__module__": kind.__module__,
            "logits": property(_read, _write),
            "__repr__": _shown,
            "__reduce__": _without,
        },
    )


def _read(outputs: Any) -> Any:
    make = outputs.__dict__.pop(MAKER, None)
    if make is not None:
        outputs.__dict__["logits"] = make()
    return outputs.__dict__.get("logits")


def _shown(outputs: Any) -> str:
    """Return a repr without unread logits: at stage 3 a single rank that prints its outputs would
    wait for the others.
    """
    fields = ", ".join(f"{name}={value!r}" for name, value in outputs.items())
    return f"{type(outputs).__name__}({fields})"


def _without(outputs: Any) -> tuple[Any, ...]:
    return functools.partial(type(outputs).__bases__[0], **outputs), ()


def _write(outputs: Any, value: Any) -> None:
    outputs.__dict__["logits"] = value
