"""A row of the key table: what a key may hold, what becomes of it, and the constructors that
keep the table readable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hf_zero.config.kinds import SECTION, Kind


class Status(Enum):
    """ACTIVE changes what hf-zero does; INERT is accepted and has no effect; NOT_BUILT asks for
    what this version lacks.
    """

    ACTIVE = "active"
    INERT = "inert"
    NOT_BUILT = "not built"


def _never(value: Any) -> bool:
    return False


def _busy(values: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class Key:
    """One row: ``path`` as in the JSON, ``field`` as in ZeroConfig (empty when it has none there).

    ``note`` says what an active key sets, why an inert one has no effect, or which feature is not
    built. ``asks`` tells whether a value asks for that feature, and ``off`` is what to write
    instead. ``members`` are the keys of a section that is taken or refused as a whole; None leaves
    them open. ``idle`` says, from all values by path, why an active key has no effect beside them,
    or "".
    """

    path: str
    kind: Kind
    status: Status
    note: str = ""
    default: Any = None
    field: str = ""
    asks: Callable[[Any], bool] = _never
    off: str = ""
    members: frozenset[str] | None = None
    idle: Callable[[Mapping[str, Any]], str] = _busy


def active(
    path: str,
    kind: Kind,
    default: Any = None,
    field: str = "",
    note: str = "",
    idle: Callable[[Mapping[str, Any]], str] | None = None,
) -> Key:
    """A key that hf-zero acts on, unless ``idle`` says why not; its field in ZeroConfig is its
    path unless named.
    """
    return Key(path, kind, Status.ACTIVE, note, default, field or path, idle=idle or _busy)


def inert(path: str, kind: Kind, why: str, field: str = "") -> Key:
    """A key without effect here."""
    return Key(path, kind, Status.INERT, why, None, field)


def unbuilt(path: str, kind: Kind, feature: str, *off: Any, field: str = "") -> Key:
    """A key that asks for a missing feature unless its value is one of ``off`` (False when none
    is given).
    """
    values = off or (False,)
    return Key(
        path,
        kind,
        Status.NOT_BUILT,
        feature,
        values[0],
        field,
        lambda value: value not in values,
        json.dumps(values[0]),
    )


def switched(
    path: str,
    feature: str,
    members: str = "",
    asks: Callable[[Any], bool] | None = None,
    off: str = '{"enabled": false}',
) -> Key:
    """A whole section that asks for a missing feature once it is enabled, or once ``asks`` says
    so.
    """
    names = frozenset(members.split()) | {"enabled"} if members else None
    on = asks or enabled
    return Key(
        path,
        SECTION,
        Status.NOT_BUILT,
        feature,
        None,
        "",
        lambda section: section.get("enabled") is not False and on(section),
        off,
        names,
    )


def under(section: str, *keys: Key) -> tuple[Key, ...]:
    """The same rows one section deeper; a field named after its path follows it."""
    return tuple(
        replace(
            key,
            path=f"{section}.{key.path}",
            field=f"{section}.{key.path}" if key.field == key.path else key.field,
        )
        for key in keys
    )


def enabled(section: Any) -> bool:
    """Whether a section is switched on: by its own ``enabled``, else by that of any section
    inside it.
    """
    if not isinstance(section, Mapping) or section.get("enabled") is False:
        return False
    return bool(section.get("enabled")) or any(enabled(value) for value in section.values())


def larger_than_one(*names: str) -> Callable[[Any], bool]:
    """Whether any of these (dotted) members of a section is a size above 1."""

    def asks(section: Any) -> bool:
        for name in names:
            value = section
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if isinstance(value, (int, float)) and value > 1:
                return True
        return False

    return asks
