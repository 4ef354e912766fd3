"""The settings of an optimizer's groups: as a checkpoint has them (JSON values, no tensors, no
switches), multiplied for the length of a step, and compared with those of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.logging import JsonObject, abridged
from hf_zero.optim.moment_formats import FORMATS
from hf_zero.optim.segments import ParamGroup

# Switches choose the implementation in the running process, not the result. A value that JSON
# cannot hold (a function, say) stays with the running object, too.
NOT_KEPT = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", *FORMATS}
)
_MISSING = object()
# notes of the one-bit steps in groups: the step that the variances belong to, the ratio of norms
FROZEN_AT, ALL_FROZEN_AT, NORM_RATIO = NOTES = ("frozen_at", "all_frozen_at", "norm_ratio")


@contextmanager
def scaled_rates(groups: Sequence[MutableMapping[str, Any]], factor: float) -> Iterator[None]:
    """Multiply the learning rate of each group by ``factor`` inside this context. Schedules, which
    compute rates from the current ones, never see the product.
    """
    rates = [group["lr"] for group in groups]
    saved_rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    for group, rate in zip(groups, rates):
        _restore(group, {"lr": rate * factor})
    try:
        yield
    finally:
        for group, rate in zip(groups, saved_rates):
            _restore(group, {"lr": rate})


def plain_settings(group: ParamGroup) -> JsonObject:
    """Return the settings of ``group`` as JSON-able values; tuples become lists, one-element
    tensors numbers.
    """
    values = {name: _plain_value(value) for name, value in group.items() if name not in NOT_KEPT}
    return {name: value for name, value in values.items() if value is not _MISSING}


def load_settings(group: MutableMapping[str, object], saved: Mapping[str, object]) -> None:
    """Replace the settings of ``group`` by a checkpoint's, ``saved``; drop :data:`NOTES`."""
    for name in NOTES:
        group.pop(name, None)
    _restore(group, saved)


def _restore(group: MutableMapping[str, object], saved: Mapping[str, Any]) -> None:
    """Write ``saved`` into ``group``, each value in the form the group holds now (tensor filled in
    place, tuple, number).
    """
    for name, value in saved.items():
        if name in NOT_KEPT:
            continue
        present = group.get(name)
        if isinstance(present, Tensor):
            present[...] = value
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


def _plain_value(value: object) -> Any:
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


_NUMBERS = frozenset({float, bool, int})


class GroupSettings:
    """The settings of the groups of ``optimizer``, as checkpoints have them, and what a script has
    changed of ``names``, which are equal on all ranks when this object is made. Tensors on a
    device, for which the host would wait, are left out of that.
    """

    def __init__(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        self._optimizer = optimizer
        self._names = [name for name in names if name not in NOT_KEPT]
        self._first = self._last = self._values()
        self._changes = ""

    def changes(self) -> str:
        """Return the settings that differ from the first ones: the same text on ranks with the same
        settings, other texts on others; "" without any.
        """
        values = self._values()
        if values != self._last:
            self._last = values
            self._changes = abridged(
                f"{name} {_text(value)} in group {at}"
                for at, (group, first) in enumerate(zip(values, self._first))
                for name, value, before in zip(self._names, group, first)
                if value != before and _text(value) != _text(before)
            )
        return self._changes

    def hyperparameters(self) -> list[ParamGroup]:
        """Return the :func:`plain_settings` of each group."""
        return [plain_settings(group) for group in self._optimizer.param_groups]

    def load(self, saved: Sequence[Mapping[str, object]]) -> None:
        """Write ``saved`` into the live group dicts, so that a schedule continues from there."""
        self.refuse_other_groups(saved, "hyperparameters")
        for group, values in zip(self._optimizer.param_groups, saved):
            load_settings(group, values)

    def refuse_other_groups(self, saved: Sequence[object], what: str) -> None:
        """Raise UnsupportedOptimizerError if ``saved`` has another number of groups."""
        live = len(self._optimizer.param_groups)
        if len(saved) != live:
            raise UnsupportedOptimizerError(
                f"{what} of {len(saved)} groups cannot go into optimizer "
                f"{type(self._optimizer).__name__} with {live}; build the optimizer with the "
                "groups it was saved with, or load without optimizer states"
            )

    def _values(self) -> list[list[object]]:
        return [
            [v if type(v) in _NUMBERS else _compared(v) for v in map(group.get, self._names)]
            for group in self._optimizer.param_groups
        ]


def _text(value: object) -> str:
    """Return ``value`` as text, without the last bits of a schedule's cosine, in which hosts may
    differ.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def compared_settings(group: ParamGroup) -> dict[str, object]:
    """Return the settings of ``group`` that the host can compare without waiting for a device:
    None for tensors on one.
    """
    return {name: _compared(value) for name, value in group.items() if name not in NOT_KEPT}


def _compared(value: object) -> object:
    """Return ``value`` as it is compared, None if it is not."""
    if value is None or type(value) in _NUMBERS or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return [*map(_compared, value)]
    on_host = isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
    return value.item() if on_host else None  # type: ignore[attr-defined]
