"""A key of the configuration, declared once: as a field of a section by :func:`key`, or, where no
field holds it, as a row by :func:`inert`, :func:`unbuilt` or :func:`switched`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
    them open. ``idle`` says, from all values by path, why an active key has no effect with them, or
    "". ``unit`` is what a number counts, ``since`` the version that first knew the key. ``instead``
    says what is done where a file written for DeepSpeed asks for what is not built; without it
    such a file is refused.
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
    unit: str = ""
    since: str = "0.1.0"
    instead: str = ""

    def changes_nothing(self, value: Any) -> bool:
        """Whether a library may have written ``value`` by habit: Accelerate writes an infinite
        ``steps_per_print``.
        """
        return self.status is not Status.ACTIVE or value in (self.default, None, "auto", math.inf)


def key(
    kind: Kind,
    default: Any = None,
    note: str = "",
    /,
    *,
    name: str = "",
    idle: Callable[[Mapping[str, Any]], str] | None = None,
    row: Key | None = None,
    unit: str = "",
    since: str = "0.1.0",
    **more: Any,
) -> Any:
    """A field of a section's dataclass that is a key of DeepSpeed's dialect, or ours.

    ``name`` is the key where it is not the field's name. ``row`` is an inert key or one that is not
    built, whose field holds what was written. ``more`` goes to ``dataclasses.field`` and may
    replace the default that the field has when a section is made by hand.
    """
    declared = row or Key(
        name, kind, Status.ACTIVE, note, default, idle=idle or _busy, unit=unit, since=since
    )
    if not {"default", "default_factory", "required"} & set(more):
        more["default"] = declared.default
    more.pop("required", None)
    return dataclasses.field(metadata={"key": declared}, **more)


def section(path: str, made_of: type, **more: Any) -> Any:
    """A field that holds the section ``made_of``, whose keys stand below ``path``."""
    return dataclasses.field(metadata={"section": (path, made_of)}, **more)


def sections_of(settings: type) -> dict[str, tuple[str, type]]:
    """Path and dataclass of each section, by the field of ``settings`` that holds it."""
    found = {item.name: item.metadata.get("section") for item in dataclasses.fields(settings)}
    return {name: held for name, held in found.items() if held}


def declared_keys(settings: type) -> Iterator[Key]:
    """The keys that fields of ``settings`` and of its sections declare, in their order."""
    yield from placed(settings, "", "")
    for item in dataclasses.fields(settings):
        if "section" in item.metadata:
            path, made_of = item.metadata["section"]
            yield from placed(made_of, f"{path}.", f"{item.name}.")


def placed(made_of: type, path: str, owner: str) -> Iterator[Key]:
    """The keys of one dataclass, below ``path``, held by its fields in ``owner``."""
    for item in dataclasses.fields(made_of):
        if "key" in item.metadata:
            row = item.metadata["key"]
            yield replace(row, path=f"{path}{row.path or item.name}", field=f"{owner}{item.name}")


def spellings(settings: type) -> dict[str, str]:
    """The paths that the names of fields would have, where a key is called otherwise."""
    found = {}
    for item in dataclasses.fields(settings):
        if "section" in item.metadata:
            path, made_of = item.metadata["section"]
            found.update(
                {
                    f"{path}.{inner.name}": f"{path}.{inner.metadata['key'].path}"
                    for inner in dataclasses.fields(made_of)
                    if inner.metadata["key"].path not in ("", inner.name)
                }
            )
        elif "key" in item.metadata and item.metadata["key"].path not in ("", item.name):
            found[item.name] = item.metadata["key"].path
    return found


def inert(path: str, kind: Kind, why: str) -> Key:
    """A key without effect here."""
    return Key(path, kind, Status.INERT, why)


def unbuilt(path: str, kind: Kind, feature: str, *off: Any, instead: str = "") -> Key:
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
        "",
        lambda value: value not in values,
        json.dumps(values[0]),
        instead=instead,
    )


def switched(
    path: str,
    feature: str,
    members: str = "",
    asks: Callable[[Any], bool] | None = None,
    off: str = '{"enabled": false}',
    instead: str = "",
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
        instead=instead,
    )


def under(section: str, *keys: Key) -> tuple[Key, ...]:
    """The same rows one section deeper."""
    return tuple(replace(key, path=f"{section}.{key.path}") for key in keys)


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
