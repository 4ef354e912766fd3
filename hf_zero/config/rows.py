"""Declarations of configuration keys: :func:`key` declares a field of a section; :func:`inert`,
:func:`unbuilt` and :func:`switched` declare rows without a field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hf_zero.config.kinds import SECTION, Kind


class Status(Enum):
    """The effect of a key. ACTIVE changes the behaviour of hf-zero; INERT is accepted and has no
    effect; NOT_BUILT asks for a feature that this version lacks.
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
    """One row: ``path`` as in the JSON, ``field`` as in ZeroConfig (empty if it has none).

    ``note``: what an active key sets, why an inert one has no effect, or the feature that is not
    built. ``asks``: whether a value asks for a feature that hf-zero lacks; ``off``: the value to
    write to disable it. ``members``: the keys of a section that is accepted or refused as a whole;
    None accepts any. ``idle``: the reason, from all values by path, why an active key has no
    effect, or "". ``unit``: what a number counts. ``since``: the version that introduced the key.
    ``instead``: the fallback for a file written for DeepSpeed that asks for an unbuilt feature;
    without it such a file is refused.
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
        """Return whether a library may have written ``value`` by habit: Accelerate writes an
        infinite ``steps_per_print``.
        """
        return self.status is not Status.ACTIVE or value in (self.default, None, "auto", math.inf)

    def why_idle(self, values: Mapping[str, Any], autos: Collection[str]) -> str:
        """Return the reason from ``idle``, unless it is the value of a key that is still "auto"."""
        why = self.idle(values)
        return "" if any(auto in why for auto in autos) else why

    @property
    def off_note(self) -> str:
        """What to say of a feature that is not built, where the value disables it."""
        return f"it is off; hf-zero does not provide {self.note.partition('; ')[0]}"


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
    """Declare a field of a section's dataclass as a key of DeepSpeed's dialect, or of ours.

    ``name`` is the key if it differs from the field's name. ``row`` is an inert or unbuilt key
    whose written value the field holds. ``more`` goes to ``dataclasses.field`` and may override the
    default that the field has when a section is constructed directly.
    """
    declared = row or Key(
        name, kind, Status.ACTIVE, note, default, idle=idle or _busy, unit=unit, since=since
    )
    if not {"default", "default_factory", "required"} & set(more):
        more["default"] = declared.default
    more.pop("required", None)
    return dataclasses.field(metadata={"key": declared}, **more)


def without(switch: str, *outer: str) -> Callable[[Mapping[str, Any]], str]:
    """Return an ``idle`` function for keys that act only if the key ``switch`` is true and none of
    ``outer`` is false.
    """

    def idle(values: Mapping[str, Any]) -> str:
        if not values.get(switch):
            return f"{switch} is false"
        return next((f"{path} is false" for path in outer if values.get(path) is False), "")

    return idle


def section(path: str, made_of: type, **more: Any) -> Any:
    """Declare a field that holds the section ``made_of``, whose keys are below ``path``."""
    return dataclasses.field(metadata={"section": (path, made_of)}, **more)


def sections_of(settings: type) -> dict[str, tuple[str, type]]:
    """Return path and dataclass of each section, by the name of its field in ``settings``."""
    found = {item.name: item.metadata.get("section") for item in dataclasses.fields(settings)}
    return {name: held for name, held in found.items() if held}


def declared_keys(settings: type) -> Iterator[Key]:
    """Yield the keys declared by the fields of ``settings`` and of its sections, in order."""
    yield from placed(settings, "", "")
    for item in dataclasses.fields(settings):
        if "section" in item.metadata:
            path, made_of = item.metadata["section"]
            yield from placed(made_of, f"{path}.", f"{item.name}.")


def placed(made_of: type, path: str, owner: str) -> Iterator[Key]:
    """Yield the keys of one dataclass with ``path`` and ``owner`` as prefixes of path and field."""
    for item in dataclasses.fields(made_of):
        if "key" in item.metadata:
            row = item.metadata["key"]
            yield replace(row, path=f"{path}{row.path or item.name}", field=f"{owner}{item.name}")


def spellings(settings: type) -> dict[str, str]:
    """Return aliases from the names of fields to the paths of their keys, where the two differ."""
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


def inert(path: str, kind: Kind, why: str, asks: Callable[[Any], bool] = _never) -> Key:
    """Declare a key without effect here; ``why`` is the reason. ``asks``: whether a value asks for
    a feature that hf-zero lacks, which changes memory or speed at most.
    """
    return Key(path, kind, Status.INERT, why, asks=asks)


def unbuilt(path: str, kind: Kind, feature: str, *off: Any, instead: str = "") -> Key:
    """Declare a key that asks for a missing feature unless its value is one of ``off`` (default:
    False).
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
    """Declare a section that asks for a missing feature if it is enabled, or if ``asks`` returns
    true for it.
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
    """Return the rows with ``section`` as a prefix of their paths."""
    return tuple(replace(key, path=f"{section}.{key.path}") for key in keys)


def enabled(section: Any) -> bool:
    """Return whether a section is enabled: by its own ``enabled``, else by that of any nested
    section.
    """
    if not isinstance(section, Mapping) or section.get("enabled") is False:
        return False
    return bool(section.get("enabled")) or any(enabled(value) for value in section.values())


def larger_than_one(*names: str) -> Callable[[Any], bool]:
    """Return a predicate: whether any of these (dotted) members of a section is a number above
    1.
    """

    def asks(section: Any) -> bool:
        for name in names:
            value = section
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if isinstance(value, (int, float)) and value > 1:
                return True
        return False

    return asks
