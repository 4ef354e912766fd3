"""The settings of a parameter group in a checkpoint: plain JSON values, without tensors and without
switches.

``foreach``, ``fused``, ``capturable`` and ``differentiable`` choose the implementation in the
running process, not the result, so they are neither saved nor restored. A value that JSON cannot
hold (a function, say) stays with the running object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_NOT_KEPT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
_MISSING = object()
# notes of the one-bit steps in groups: the step that the variances belong to, the ratio of norms
FROZEN_AT, ALL_FROZEN_AT, NORM_RATIO = NOTES = ("frozen_at", "all_frozen_at", "norm_ratio")


def current(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot of the settings of ``group`` for an update on another thread: a scheduler
    writes a rate that is a tensor in place.
    """
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


@contextmanager
def scaled_rates(groups: Sequence[MutableMapping[str, Any]], factor: float) -> Iterator[None]:
    """Multiply the learning rate of each group by ``factor`` inside this context. Schedules, which
    compute rates from the current ones, never see the product.
    """
    rates = [group["lr"] for group in groups]
    kept = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    for group, rate in zip(groups, rates):
        restore(group, {"lr": rate * factor})
    try:
        yield
    finally:
        for group, rate in zip(groups, kept):
            restore(group, {"lr": rate})


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``group`` as JSON-able values; tuples become lists, one-element
    tensors numbers.
    """
    values = {name: _plain_value(value) for name, value in group.items() if name not in _NOT_KEPT}
    return {name: value for name, value in values.items() if value is not _MISSING}


def load(group: MutableMapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Replace the settings of ``group`` by those of a checkpoint; drop :data:`NOTES`."""
    for name in NOTES:
        group.pop(name, None)
    restore(group, saved)


def restore(group: MutableMapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Write ``saved`` into ``group``, each value in the form the group holds now (tensor filled in
    place, tuple, number).
    """
    for name, value in saved.items():
        if name in _NOT_KEPT:
            continue
        present = group.get(name)
        if isinstance(present, Tensor):
            present.fill_(value)
        elif isinstance(present, tuple):
            group[name] = (
                tuple(
                    old.fill_(new) if isinstance(old, Tensor) else new
                    for old, new in zip(present, value)
                )
                if len(present) == len(value)
                else tuple(value)
            )
        else:
            group[name] = value


def _plain_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        items = [_plain_value(item) for item in value]
        return _MISSING if any(item is _MISSING for item in items) else items
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else _MISSING
    if hasattr(value, "item"):  # a numpy scalar
        return _plain_value(value.item())
    return _MISSING
