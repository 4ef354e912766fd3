"""Declarations of configuration keys: :func:`key` declares a field of a section as a key. Its
:class:`ValueType` checks a raw JSON or YAML value and converts it to its canonical form.

A type never guesses: ``"8"`` is not a number and ``2`` is not a boolean. It accepts what the
Hugging Face libraries write, hence ``5e8`` counts as an integer and ``torch.bfloat16`` as the name
of a dtype.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.logging import SIZE_PATTERN, JsonObject, parse_size


@dataclass(frozen=True)
class ValueType:
    """A type of values. ``expected`` completes "… is not …" in messages; ``convert`` returns the
    canonical form or raises ValueError; ``schema`` describes the values in JSON Schema.
    """

    expected: str
    convert: Callable[[Any], Any]
    schema: JsonObject = field(default_factory=dict, compare=False)


def argument(function: str, name: str, value_type: ValueType, value: object) -> Any:
    """Return the argument ``name`` of ``function`` in the canonical form of ``value_type``. Raises
    ConfigError.
    """
    try:
        return value_type.convert(value)
    except ValueError:
        raise ConfigError(
            f"{function}({name}={value!r}): it is not {value_type.expected}; pass one, or leave it "
            "out"
        ) from None


def integer(low: int | None = None, high: int | None = None) -> ValueType:
    """Return the type of integers in ``[low, high]``, also given as floats (``5e8``)."""

    def convert(value: object) -> int:
        if (isinstance(value, numbers.Integral) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        ):
            whole = int(value)
        else:
            raise ValueError(value)
        least, most = -(1 << 63) if low is None else low, (1 << 63) - 1 if high is None else high
        if not least <= whole <= most:
            raise ValueError(value)
        return whole

    limits = {"minimum": low, "maximum": high}
    schema = {"type": "integer", **{k: v for k, v in limits.items() if v is not None}}
    return ValueType("an integer" + _bounds(low, high), convert, schema)


def number(
    low: float | None = None, high: float | None = None, *, above: float | None = None
) -> ValueType:
    """Return the type of finite numbers: at least ``low``, above ``above``, at most ``high``."""

    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(value)
        try:
            real = float(value)
        except OverflowError:
            raise ValueError(value) from None
        if (
            not math.isfinite(real)
            or (low is not None and real < low)
            or (above is not None and real <= above)
            or (high is not None and real > high)
        ):
            raise ValueError(value)
        return real

    limits = {"minimum": low, "exclusiveMinimum": above, "maximum": high}
    bounds = _bounds(low, high)
    if above is not None:
        bounds = f" greater than {above:g}" + (f" and at most {high:g}" if high else "")
    return ValueType(
        f"a number{bounds}",
        convert,
        {"type": "number", **{k: v for k, v in limits.items() if v is not None}},
    )


def _block(value: object) -> int:
    size = int(integer(4096).convert(value))
    if size % 4096:
        raise ValueError(value)
    return size


def _share(value: object) -> float:
    part = float(number(above=0).convert(value))
    if part > 1:
        raise ValueError(value)
    return part


def _seconds_or_off(value: object) -> float:
    seconds = float(number(0).convert(value))
    if 0 < seconds < 1:
        raise ValueError(value)
    return seconds


def _some_or_auto(value: object) -> float | str:
    if value == "auto":
        return "auto"
    part = float(number(0).convert(value))
    if part > 1:
        raise ValueError(value)
    return part


def _elements(value: object) -> int:
    size = _size(value)
    if size < 1:
        raise ValueError(value)
    return size


def _size(value: object) -> int:
    """Convert a bucket size to an integer; formulas such as 0.9 × hidden² leave a fraction, which
    is dropped.
    """
    return int(number(0).convert(value))


def _bytes(value: object) -> int:
    """Convert a number of bytes, or a text with its unit such as ``40GiB``."""
    if not isinstance(value, str):
        return int(integer(1).convert(value))
    try:
        size = parse_size(value)
    except ConfigError as error:
        raise ValueError(value) from error
    return int(integer(1).convert(size))


def choice(*options: str) -> ValueType:
    """Return the type of the strings ``options``, in any case."""

    def convert(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in options:
            raise ValueError(value)
        return value.lower()

    expected = "one of " + ", ".join(repr(option) for option in options)
    return ValueType(expected, convert, {"enum": list(options)})


def one_of(*options: int) -> ValueType:
    """Return the type of the integers ``options``."""

    def convert(value: object) -> int:
        whole = int(integer().convert(value))
        if whole not in options:
            raise ValueError(value)
        return whole

    return ValueType(f"one of {', '.join(map(str, options))}", convert, {"enum": list(options)})


def _bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f" of at least {low:g}" if high is None else f" from {low:g} to {high:g}"


def _boolean(value: object) -> bool:
    if not isinstance(value, int) or value not in (0, 1):  # configurations write 1 for true
        raise ValueError(value)
    return bool(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:  # no path, name or address has it
        raise ValueError(value)
    return value


def _path(value: object) -> str:
    return _text(str(value) if hasattr(value, "__fspath__") else value)


def _paths(value: object) -> str | tuple[str, ...]:
    """Convert one path, or several, to absolute form.

    A string with a comma is refused: ``/a,/b`` is neither two paths nor a likely one.
    """
    if isinstance(value, (list, tuple)):
        paths = tuple(os.path.abspath(os.path.expanduser(_path(path))) for path in value)
        if len(set(paths)) < len(paths):
            raise ValueError(value)
        return paths[0] if len(paths) == 1 else paths
    path = _path(value)
    if path.lower() == "none":  # Accelerate writes "none" for no path
        return ()
    if "," in path:
        raise ValueError(value)
    return os.path.abspath(os.path.expanduser(path))


_DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfp16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}


def _dtype(value: object) -> str:
    # str() of a torch.dtype is its name: no import of torch is needed
    for name, spellings in _DTYPES.items():
        if not isinstance(value, numbers.Number) and str(value).lower() in spellings:
            return name
    raise ValueError(value)


def _anything(value: object) -> object:
    return value


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(value)
    names = sorted(value) if isinstance(value, (set, frozenset)) else value
    return tuple(_text(name) for name in names)


def _section(value: object) -> JsonObject:
    if not isinstance(value, Mapping):
        raise ValueError(value)
    plain: dict[str, object] = _plain(value)
    return plain


def _plain(value: object) -> Any:
    """Copy a value into JSON's types: a configuration is written and read back unchanged."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(value)
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise ValueError(value)


def _report_interval(value: object) -> int | None:
    """Convert a number of steps; infinity, with which Accelerate silences reports, is None."""
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return None
    return int(integer(1).convert(value))


_STRING = {"type": "string", "minLength": 1}
_STRINGS = {"type": "array", "items": _STRING}
_SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}

BOOLEAN = ValueType("true or false", _boolean, {"type": "boolean"})
TEXT = ValueType("a non-empty string", _text, _STRING)
PATH = ValueType("a path", _path, _STRING)
PATHS = ValueType("a path, or a list of different paths", _paths, {"anyOf": [_STRING, _STRINGS]})
DTYPE = ValueType(
    "one of 'fp32', 'bf16', 'fp16'",
    _dtype,
    {"enum": [spelling for spellings in _DTYPES.values() for spelling in spellings]},
)


def named(*names: str) -> ValueType:
    """Return the type of texts that name one of ``names``: an editor completes them, and whoever
    builds the object compares them, in any case.
    """
    return ValueType(TEXT.expected, _text, {"anyOf": [{"enum": list(names)}, _STRING]})


NAMES = ValueType("a list of names", _names, _STRINGS)
SECTION = ValueType("a section of keys and plain values", _section, {"type": "object"})
INTERVAL = ValueType(
    "a positive number of steps or infinity",
    _report_interval,
    {"type": "number", "exclusiveMinimum": 0},
)
ANYTHING = ValueType("any value", _anything)
COUNT = integer(0)
BLOCK = ValueType(
    "a multiple of 4096 bytes", _block, {"type": "integer", "minimum": 4096, "multipleOf": 4096}
)
SHARE = ValueType("a number above 0 and at most 1", _share, _SHARE)
SECONDS_OR_OFF = ValueType(
    "0 or a number of at least 1",
    _seconds_or_off,
    {"anyOf": [{"const": 0}, {"type": "number", "minimum": 1}]},
)
SOME_OR_AUTO = ValueType(
    "a number from 0 to 1, or 'auto'",
    _some_or_auto,
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"const": "auto"}]},
)
BYTES = ValueType(
    "a number of bytes, such as 80GB (decimal) or 128GiB (binary)",
    _bytes,
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]},
)
ELEMENTS = ValueType(
    "a number of elements of at least 1", _elements, {"type": "number", "minimum": 1}
)
SIZE = ValueType("a number of elements of at least 0", _size, {"type": "number", "minimum": 0})


class Status(Enum):
    """The effect of a key. ACTIVE changes the behavior of hf-zero; INERT is accepted and has no
    effect; NOT_BUILT asks for a feature that this version lacks.
    """

    ACTIVE = "active"
    INERT = "inert"
    NOT_BUILT = "not built"


def never(value: object) -> bool:
    return False


def _busy(values: Mapping[str, object]) -> str:
    return ""


@dataclass(frozen=True)
class Key:
    """One row: ``path`` as in the JSON, ``field`` as in ZeroConfig (empty if it has none).

    ``note``: what an active key sets, why an inert one has no effect, or the feature that is not
    built. ``asks``: whether a value asks for a feature that hf-zero lacks; ``off``: the value to
    write to disable it. ``members``: the keys of a section that is accepted or refused as a whole;
    None accepts any. ``idle``: the reason, from all values by path, why an active key has no
    effect, or "". ``unit``: what a number counts. ``instead``: the fallback for a file written for
    DeepSpeed that asks for an unbuilt feature; without it such a file is refused.
    """

    path: str
    value_type: ValueType
    status: Status
    note: str = ""
    default: Any = None
    field: str = ""
    asks: Callable[[Any], bool] = never
    off: str = ""
    members: frozenset[str] | None = None
    idle: Callable[[Mapping[str, object]], str] = _busy
    unit: str = ""
    instead: str = ""

    def changes_nothing(self, value: object) -> bool:
        """Return whether a library may have written ``value`` by habit: Accelerate writes an
        infinite ``steps_per_print``.
        """
        return self.status is not Status.ACTIVE or value in (self.default, None, "auto", math.inf)

    def why_idle(self, values: Mapping[str, object], autos: Collection[str]) -> str:
        """Return the reason from ``idle``, unless it is the value of a key that is still "auto"."""
        why = self.idle(values)
        return "" if any(auto in why for auto in autos) else why

    @property
    def off_note(self) -> str:
        """Note on a feature that is not built, where the value disables it."""
        return f"it is off; hf-zero does not provide {self.note.partition('; ')[0]}"


def key(
    value_type: ValueType,
    default: Any = None,
    note: str = "",
    /,
    *,
    name: str = "",
    idle: Callable[[Mapping[str, object]], str] | None = None,
    unit: str = "",
    **more: Any,
) -> Any:
    """Declare a field of a section's dataclass as a key of DeepSpeed's dialect, or of ours.

    Args:
        default: the value of a key that is not written.
        note: empty for the keys that ``keys.toml`` describes.
        name: the key, if it differs from the field's name.
        idle: returns, of all values by path, why the key has no effect, or "".
        unit: what a number counts.
        more: for ``dataclasses.field``: ``default`` or ``default_factory`` of a section that is
            constructed directly, ``hash=False`` for dicts and lists; ``required=True`` leaves the
            field without a default.
    """
    declared = Key(name, value_type, Status.ACTIVE, note, default, idle=idle or _busy, unit=unit)
    if not {"default", "default_factory", "required"} & set(more):
        more["default"] = declared.default
    more.pop("required", None)
    return dataclasses.field(metadata={"key": declared}, **more)


def without(switch: str, *outer: str) -> Callable[[Mapping[str, object]], str]:
    """Return an ``idle`` function for keys that act only if the key ``switch`` is true and none of
    ``outer`` is false.
    """

    def idle(values: Mapping[str, object]) -> str:
        if not values.get(switch):
            return f"{switch} is false"
        return next((f"{path} is false" for path in outer if values.get(path) is False), "")

    return idle


def section(path: str, made_of: type, **more: Any) -> Any:
    """Declare a field that holds the section ``made_of``, whose keys are below ``path``."""
    return dataclasses.field(metadata={"section": (path, made_of)}, **more)


def sections_of(settings: type) -> dict[str, tuple[str, type]]:
    """Return path and dataclass of each section, by the name of its field in ``settings``."""
    declared = {item.name: item.metadata.get("section") for item in dataclasses.fields(settings)}
    return {name: section_of for name, section_of in declared.items() if section_of}


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
    aliases = {}
    for item in dataclasses.fields(settings):
        if "section" in item.metadata:
            path, made_of = item.metadata["section"]
            aliases.update(
                {
                    f"{path}.{inner.name}": f"{path}.{inner.metadata['key'].path}"
                    for inner in dataclasses.fields(made_of)
                    if inner.metadata["key"].path not in ("", inner.name)
                }
            )
        elif "key" in item.metadata and item.metadata["key"].path not in ("", item.name):
            aliases[item.name] = item.metadata["key"].path
    return aliases


def enabled(section: object) -> bool:
    """Return whether a section is enabled: by its own ``enabled``, or that of a nested section."""
    if not isinstance(section, Mapping) or section.get("enabled") is False:
        return False
    return bool(section.get("enabled")) or any(enabled(value) for value in section.values())
