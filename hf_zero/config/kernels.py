"""The names of the fused kernels, and those that "auto" selects on each kind of device: that of the
optimizer's update, and those that features add in their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.value_types import NAMES as LIST
from hf_zero.config.value_types import ValueType

ON: Mapping[str, tuple[str, ...]] = {
    name: kinds for row in FEATURES.values() for name, kinds in row.kernels.items()
} | {"optimizer": ("cuda", "cpu")}
"""The kinds of devices on which "auto" selects each kernel."""

NAMES = tuple(ON)

AUTO: dict[str, tuple[str, ...]] = {
    kind: tuple(name for name in NAMES if kind in ON[name])
    # A GPU without a Triton driver, or with Triton disabled, would run the reference versions.
    for kind in ("cuda", "cuda without Triton", "cpu")
}
"""The kernels of "auto", by the kind of device."""


def auto(device: str) -> tuple[str, ...]:
    """Return the kernels of "auto" on ``device``, a key of :data:`AUTO`; none for other devices."""
    return AUTO.get(device, ())


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` without duplicates in the order of :data:`NAMES`.

    Raises ValueError for an unknown name.
    """
    chosen = [*names]
    if unknown := [name for name in chosen if name not in NAMES]:
        raise ValueError(min(unknown, key=str))
    return tuple(name for name in NAMES if name in chosen)


def _kernels(value: object) -> str | tuple[str, ...]:
    """Convert to ``off``, ``auto`` (or ``on``) or kernel names; an empty list is ``off``. YAML
    parses the bare words off and on as booleans.
    """
    if isinstance(value, bool):
        return "auto" if value else "off"
    if isinstance(value, str):
        if value not in ("off", "auto", "on"):
            raise ValueError(value)
        return "off" if value == "off" else "auto"
    return in_order(LIST.convert(value)) or "off"


KERNELS = ValueType(
    f"'auto', 'off' or a list of names among {', '.join(NAMES)}",
    _kernels,
    {
        "anyOf": [
            {"enum": ["auto", "off", "on", True, False]},
            {"type": "array", "items": {"enum": list(NAMES)}},
        ]
    },
)
