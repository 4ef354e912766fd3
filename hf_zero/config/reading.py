"""Reader of raw mappings: looks each key up in the table, converts and checks its value, records
its source, and collects all errors into one exception, so that a user fixes them in one pass.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from hf_zero.config.keys import ALIASES, ANSWERS, KEYS, MEANT, OWN_AUTOS, SECTIONS
from hf_zero.config.sourced import FILES, SourcedDict, shown
from hf_zero.config.spelling import MISSPELT, closest, did_you_mean, is_comment, is_foreign
from hf_zero.config.value_types import Key, Status
from hf_zero.errors import ConfigError, HfZeroError, NotBuiltError
from hf_zero.logging import JsonObject, log_rank0

T = TypeVar("T")
AUTO = "auto"
ENDING = re.compile(r"_?(config|configuration|cfg|settings|options|args|kwargs)$")
SWITCHES = ("fp16", "bf16")  # sections that a keyword may switch on or off


class Mistakes(list[HfZeroError]):
    """Errors about a configuration, in the order of their discovery."""

    def add(self, text: str) -> None:
        """Append a ConfigError of ``text``."""
        self.append(ConfigError(text))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context manager that collects a ConfigError or NotBuiltError raised inside and continues
        after the block.
        """
        try:
            yield
        except (ConfigError, NotBuiltError) as error:
            self.append(error)

    @staticmethod
    def texts(error: HfZeroError) -> list[str]:
        """Return the messages of the errors that :meth:`throw` raised as ``error``."""
        return str(error).split("\n- ")[1:] or [str(error)]

    def throw(self) -> None:
        """Raise the collected errors: a single one as it is, several as a list of messages."""
        errors = {str(error): error for error in self}  # one mistake may be found twice
        if len(errors) == 1:
            raise next(iter(errors.values()))
        if errors:
            kind = (
                NotBuiltError
                if all(isinstance(error, NotBuiltError) for error in self)
                else ConfigError
            )
            raise kind(
                f"{len(errors)} mistakes in the configuration:"
                + "".join(f"\n- {message}" for message in errors)
            )


@dataclass
class ConfigReading:
    """Checked values by their path in the table.

    ``sources`` maps a path to the source of its value. ``autos`` are the paths whose value is still
    "auto". ``filled`` are the paths that a resolve for some number of ranks computed. ``mistakes``
    are all errors found; a wrong value is left out. ``foreign``: the mapping was written for
    DeepSpeed, so unknown keys at its top, and unbuilt keys with an ``instead``, are skipped with a
    warning. ``refusals`` returns, by key, why ``initialize`` refuses values; it is called if there
    are mistakes, so that one message has them all. ``autos_allowed``: whether values may still be
    "auto" once the reading is checked; "alone": only if nothing else is wrong.
    """

    values: JsonObject = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    mistakes: Mistakes = field(default_factory=Mistakes)
    foreign: bool = False
    origins: SourcedDict | None = None
    autos_allowed: bool | Literal["alone"] = True
    refusals: Callable[[Mapping[str, object]], Mapping[str, str]] | None = None

    def read(self, mapping: Mapping[str, object], label: str) -> ConfigReading:
        """Read a mapping of the DeepSpeed dialect or of our own keywords; later readings override
        earlier ones.
        """
        origins = mapping if isinstance(mapping, SourcedDict) else None
        inner = ConfigReading(foreign=self.foreign, origins=origins)
        inner._walk(
            {key: value for key, value in mapping.items() if "." not in str(key)}, "", "", label
        )
        # TRL adds dotted keys to a config whose section may hold the same key: the dotted one
        # overrides it
        for key, value in mapping.items():
            if "." in str(key):
                dotted = ConfigReading(origins=inner.origins)
                with dotted.mistakes.collect():
                    dotted._take(canonical(key), key, value, label)
                inner.update(dotted)
        with inner.mistakes.collect():
            inner._settle(mapping, label)
        self.update(inner)
        return self

    def put(
        self, path: str, value: object, written: str, label: str, keys: Mapping[str, Key] = KEYS
    ) -> None:
        """Read one value of the file's key ``written`` for the key ``path`` of the table."""
        with self.mistakes.collect():
            self._judge(keys[path], value, written, label)

    def read_key(self, written: str, value: object, label: str) -> None:
        """Read one key of the DeepSpeed dialect, with its sections before it, by itself."""
        with self.mistakes.collect():
            self._take(canonical(written), written, value, label)

    def update(self, other: ConfigReading) -> None:
        """Override values by those of ``other``, and take over its mistakes."""
        for path in [*other.values, *other.autos]:
            self.discard(path)
        self.values.update(other.values)
        self.autos |= other.autos
        self.sources.update(other.sources)
        self.filled |= other.filled
        self.mistakes.extend(other.mistakes)

    def given(self) -> JsonObject:
        """Return the values by path; sections that are one value contain their members that are
        "auto", in the order of the file.
        """
        return {
            path: value | self._autos_in(path) if isinstance(value, dict) else value
            for path, value in self.values.items()
        }

    def _autos_in(self, section: str) -> dict[str, str]:
        return {
            path.removeprefix(f"{section}."): AUTO
            for path in self.sources
            if path in self.autos and path.startswith(f"{section}.")
        }

    def discard(self, path: str) -> None:
        """Remove a value and, for a section, the members that are "auto"."""
        self.values.pop(path, None)
        self.filled.discard(path)
        for gone in [name for name in self.sources if name == path or name.startswith(f"{path}.")]:
            self.autos.discard(gone)
            del self.sources[gone]

    def fill(self, path: str, value: T, source: str) -> T:
        """Set a value that was not written, and record it in ``filled``; return it."""
        self.values[path], self.sources[path] = value, source
        self.filled.add(path)
        return value

    def _walk(
        self, mapping: Mapping[str, object], prefix: str, written_prefix: str, label: str
    ) -> None:
        for key, value in mapping.items():
            with self.mistakes.collect():
                if not isinstance(key, str):
                    raise ConfigError(
                        f"{label}: {written_prefix}{key!r} is not a name; keys are strings"
                    )
                written = written_prefix + key
                file = label if self.origins is None else self.origins.label_of(written, label)
                self._take(canonical(prefix + key), written, value, file)

    def _take(self, path: str, written: str, value: object, label: str) -> None:
        if path in KEYS:
            self._judge(KEYS[path], value, written, label)
        elif self.foreign and "." not in written and _is_foreign(written, value):
            _warn(f"{label}: the key {written!r} is not known here and has no effect")
        elif path not in SECTIONS:
            raise _unknown(written, value, path, label)
        elif isinstance(value, Mapping):
            self._walk(value, path + ".", written + ".", label)
        elif isinstance(value, str) and written in ("offload_optimizer", "offload_param"):
            self._judge(KEYS[path + ".device"], value, written, label)
        elif written == "compile" and (value is False or value == "blocks"):
            # YAML parses a bare off as false
            self._judge(KEYS["compile.blocks"], value == "blocks", written, label)
        elif isinstance(value, bool) and written == "activation_offload":
            self._judge(KEYS[path + ".enabled"], value, written, label)
        elif value is not None:
            raise ConfigError(
                f"{label}: {written} = {shown(value, label)} is not "
                f"{_expected_section(path, written, label)}"
            )

    def _contradiction(self, path: str, other: str, label: str) -> ConfigError:
        """Return the error for ``other``, which means ``path``, too, and has another value."""
        return ConfigError(
            f"{label}: {other} contradicts {self.sources[path]} = "
            f"{shown(self.values[path], label)}: both mean {path}; remove one of them"
        )

    def _judge(self, key: Key, value: object, written: str, label: str) -> None:
        path, source = key.path, self._source(key, value, written, label)
        if value is None and path != "zero_optimization.stage":
            return
        if value == AUTO and path != "zero_optimization.stage" and path not in OWN_AUTOS:
            self.autos.add(path)
            self.sources[path] = source
            return
        try:
            converted = key.value_type.convert(value)
        except ValueError:
            kind = "" if label.startswith(FILES) else f" ({type(value).__name__})"
            raise ConfigError(
                f"{label}: {written} = {shown(value, label)}{kind} is not {key.value_type.expected}"
                f"{_remedy(key, value, label)}"
            ) from None
        if isinstance(converted, dict):
            self._check_members(key, converted, written, label)
            for name in [name for name, member in converted.items() if member == AUTO]:
                self.autos.add(f"{path}.{name}")
                self.sources[f"{path}.{name}"] = f"{source}.{name}"
                del converted[name]
        asks = key.status is Status.NOT_BUILT and key.asks(converted)
        if asks and self.foreign and key.instead:
            _warn(f"{label}: {written} has no effect: {key.instead}")
            return
        if asks:
            feature, _, advice = key.note.partition("; ")
            raise NotBuiltError(
                f"{label}: {written} = {shown(value, label)} asks for {feature}, which this "
                "version of hf-zero does not provide; "
                f"{advice + '; ' if advice else ''}remove the key or write {key.off}"
            )
        if path in self.values and self.values[path] != converted:
            raise self._contradiction(path, f"{written} = {shown(value, label)}", label)
        self.values[path] = converted
        self.sources[path] = source

    def _source(self, key: Key, value: object, written: str, label: str) -> str:
        if label == "keyword":
            return label
        if self.origins is not None:
            return self.origins.source_of(written, value, key.changes_nothing(value))
        return f"{label}: {written}"

    def _check_members(
        self, key: Key, section: dict[str, object], written: str, label: str
    ) -> None:
        for name, value in section.items():
            with self.mistakes.collect():
                if key.members is not None and name not in key.members:
                    hint = did_you_mean(name, [f"{written}.{member}" for member in key.members])
                    raise ConfigError(f"{label}: unknown key {f'{written}.{name}'!r}{hint}")
                # members of a disabled section are not checked, so a misspelt switch must not pass
                # for "off"
                if (
                    key.status is Status.NOT_BUILT
                    and isinstance(value, bool)
                    and name != "enabled"
                    and closest(name, ["enabled"])
                ):
                    raise ConfigError(
                        f"{label}: unknown key {f'{written}.{name}'!r}; did you mean "
                        f"'{written}.enabled'?"
                    )

    def _settle(self, mapping: Mapping[str, Any], label: str) -> None:
        for section in ("optimizer", "scheduler"):
            # TRL writes {"type": None} to say that there is none
            if f"{section}.params" in self.values and "type" not in mapping.get(
                section, {"type": None}
            ):
                raise ConfigError(
                    f"{label}: {section} names no type; write {section}: {{type: …, params: "
                    "{…}} or remove the section"
                )
        if str(self.values.get("fp16.type", "")).startswith("b"):
            self._rename("fp16.enabled", "bf16.enabled")
        self.discard("fp16.type")
        self._translate_former_offload(label)

    def _translate_former_offload(self, label: str) -> None:
        """Translate DeepSpeed's former booleans to a device, and to pinned memory for each
        offloaded section.
        """
        zero = "zero_optimization"
        for old, section in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            self._move(
                f"{zero}.{old}",
                (f"{zero}.{section}.device",),
                lambda on: "cpu" if on else "none",
                label,
            )
        places = (f"{zero}.offload_optimizer", f"{zero}.offload_param")
        chosen = [
            f"{section_path}.pin_memory"
            for section_path in places
            if self.values.get(f"{section_path}.device", "none") != "none"
        ]
        self._move(
            f"{zero}.cpu_offload_use_pin_memory",
            chosen or [f"{section_path}.pin_memory" for section_path in places],
            bool,
            label,
        )

    def _move(
        self, old: str, targets: Iterable[str], convert: Callable[[object], object], label: str
    ) -> None:
        """Move the value of ``old`` to ``targets``. Raises ConfigError if one of them has a
        different value.
        """
        if old not in self.values and old not in self.autos:
            return
        value, source, auto = self.values.get(old), self.sources[old], old in self.autos
        self.discard(old)
        for path in targets:
            if auto:
                self.autos.add(path)
            elif path in self.values and self.values[path] != convert(value):
                raise self._contradiction(path, f"{old} = {shown(value, label)}", label)
            else:
                self.values[path] = convert(value)
            self.sources.setdefault(path, source)

    def _rename(self, old: str, new: str) -> None:
        if old in self.values:
            self.values[new] = self.values.pop(old)
            self.sources[new] = self.sources.pop(old)
        if old in self.autos:
            self.autos.remove(old)
            self.autos.add(new)
            self.sources[new] = self.sources.pop(old)

    def forget_autos(self, source: str) -> None:
        """Reset values that are still "auto" to their defaults, except precisions: a model cannot
        be evaluated in an unknown one.
        """
        for path in self.autos - {"fp16.enabled", "bf16.enabled"}:
            self.autos.discard(path)
            self.sources[path] = source

    def refuse_autos(self) -> None:
        """Raise ConfigError if a value is still "auto", naming each key and the values to write."""
        if self.autos:
            lines = [
                f"  {path} ({self.sources[path]}): write "
                f"{KEYS[path].value_type.expected if path in KEYS else 'a value'}"
                for path in sorted(self.autos)
            ]
            raise ConfigError(
                "these keys are still 'auto', which only Accelerate or the Trainer can fill in, "
                "from the arguments and the model:\n"
                + "\n".join(lines)
                + "\nor remove them to take the default"
            )


def canonical(written: str) -> str:
    """Return the table's path of a written key, whose parts may be aliases, sections included."""
    path = ""
    for part in written.split("."):
        path = f"{path}.{part}" if path else part
        path = ALIASES.get(path, path)
    return path


def misspelt(written: str, value: object) -> bool:
    """Return whether an unknown key of ``value`` is probably meant for a known one, or is one that
    acts at the top, or at the top one that acts in one section.
    """
    path = canonical(written)
    if path in KEYS or path in SECTIONS or written.lower() in ANSWERS:
        return False
    section, _, name = path.rpartition(".")
    acts = name in SECTIONS or (name in KEYS and KEYS[name].status is Status.ACTIVE)
    below = [] if section else [key for key in KEYS if key.rpartition(".")[2] == name]
    acts = acts or len([key for key in below if not _idle(key)]) == 1
    return acts or bool(meant(written, value))


def meant(written: str, value: object) -> list[str]:
    """Return the known names that an unknown key of ``value`` is probably meant for: at the top
    those of :func:`_meant_at_top`, and else the names of its section that it resembles.
    """
    section, _, name = canonical(written).rpartition(".")
    at_top = [] if section else _meant_at_top(name.lower(), value)
    siblings = [key for key in _known() if key.rpartition(".")[0] == section]
    return at_top or closest(name, siblings, least=MISSPELT)


def _meant_at_top(name: str, value: object) -> list[str]:
    """Return the known names that have ``name`` in other libraries, or have it with an ending such
    as _config; else the sections that share a word with it, or its beginning, and know each key of
    ``value``: zero_optimization for ``zero: {stage: 3}``.
    """
    bare = ENDING.sub("", name)
    top = [key for key in _known() if "." not in key]
    for each in (name, bare):
        if each in MEANT:
            return [MEANT[each]]
        if each in top:
            return [] if _idle(each) else [each]
    bare = bare.rstrip("0123456789")
    if not isinstance(value, Mapping) or not {*value} - {"enabled"}:
        return []
    sections = {
        canonical(each): each
        for each in top
        if canonical(each) in SECTIONS
        and _share_a_word(bare, each)
        and all(canonical(f"{each}.{key}") in {*KEYS, *SECTIONS} for key in value)
    }
    return [key for key in sections.values() if not _idle(key)]


def _share_a_word(name: str, other: str) -> bool:
    return any(
        one == two or (len(one) >= 4 and two.startswith(one))
        for one in name.split("_")
        for two in other.split("_")
    )


def _remedy(key: Key, value: object, label: str) -> str:
    """Return the end of a message about the wrong ``value`` of ``key``: a name that it resembles,
    the number or truth value that a string holds, the few values there are, or the default.
    """
    options = _options(key.value_type.schema)
    for name in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(name, str) and name not in options and (similar := closest(name, options)):
            return f"; did you mean {shown(similar[0], label)}?"
    if isinstance(value, str):
        with suppress(ValueError):  # of the string, or of the kind
            meant = json.loads(value.lower())
            key.value_type.convert(meant)
            written = shown(meant, label) if isinstance(meant, bool) else value
            return f"; write {written} without quotes"
    low, high = (key.value_type.schema.get(name, 0) for name in ("minimum", "maximum"))
    if key.value_type.schema.get("type") == "integer" and 0 < high - low < 4:
        return f"; write {', '.join(map(str, range(low, high)))} or {high}"
    if key.default is None:
        return "; fix it, or remove the key"
    return f"; fix it, or remove the key for its default, {shown(key.default, label)}"


def _expected_section(path: str, written: str, label: str) -> str:
    """Return the end of a message about a value in place of the section at ``path``: what is
    expected, and an example.
    """
    name, python = written.rpartition(".")[2], label == "keyword" and "." not in written
    if python and name in SWITCHES:
        return f"True, False or a section; write {name}=True or {name}=False"
    first = next(key for key in (*KEYS, *ALIASES) if key.startswith(f"{path}."))[len(path) + 1 :]
    example = f"{{{first!r}: …}}"
    example = f"{name}={example}" if python else f"{{{name!r}: {example}}}"
    return f"a section of keys and values; write {example}"


def _options(schema: JsonObject) -> list[str]:
    """Return the names among the values that a JSON schema allows."""
    inner = [*schema.get("anyOf", ()), schema.get("items", {})]
    names = [name for name in schema.get("enum", ()) if isinstance(name, str)]
    return [*names, *(name for part in inner if part for name in _options(part))]


def _known() -> list[str]:
    return [*KEYS, *SECTIONS, *ALIASES]


def _idle(written: str) -> str:
    """Return why a known key, or each key of a known section, does nothing in hf-zero, or ""."""
    paths = f"{written}.", f"{canonical(written)}."  # a section may be an alias, or hold aliases
    below = {
        KEYS[canonical(name)].status
        for name in _known()
        if f"{name}.".startswith(paths) and canonical(name) in KEYS
    }
    if Status.ACTIVE in below:
        return ""
    return "has no effect in hf-zero" if Status.INERT in below else "hf-zero does not provide"


@cache
def _warn(message: str) -> None:
    """Warn once per message: libraries read a configuration several times."""
    log_rank0(message, logging.WARNING)


def _is_foreign(written: str, value: object) -> bool:
    """Return whether an unknown key at the top is a comment or a key of another program."""
    names = _known()
    return is_comment(written) or (is_foreign(written, names) and not meant(written, value))


def _unknown(written: str, value: object, path: str, label: str) -> ConfigError:
    section, _, name = written.rpartition(".")
    text = f"{label}: unknown key {written!r:.200}"
    if is_comment(name):
        return ConfigError(f"{text}: it reads as a comment; remove it")
    if answer := ANSWERS.get(written.lower()):
        return ConfigError(f"{text}: {answer}")
    if not section and (names := _meant_at_top(name.lower(), value)):
        return ConfigError(f"{text}; did you mean {' or '.join(map(repr, names))}?")
    known = _known()
    siblings = [key for key in known if key.rpartition(".")[0] == path.rpartition(".")[0]]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    similar = sorted(elsewhere, key=_idle) or closest(name, siblings)
    if similar and (why := _idle(similar[0])):
        return ConfigError(f"{text}; it resembles {similar[0]!r}, which {why}: remove it")
    if similar or section:
        active = [key for key in similar or siblings if not _idle(key)]
        return ConfigError(f"{text}{did_you_mean(name, active)}")
    return ConfigError(f"{text}; `hf-zero schema --table` lists the keys")
