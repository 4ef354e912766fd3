"""Readers of configuration text: JSON, Hjson and YAML files, and JSON or Hjson strings.

A parser returns a mapping, or raises ConfigError with the position of the mistake.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hf_zero.config.hjson import HjsonError, parse_hjson
from hf_zero.errors import ConfigError
from hf_zero.logging import DuplicateKeyError, JsonObject, parse_json

JSON, YAML = (".json", ".hjson"), (".yaml", ".yml")
EXAMPLE = "zero_optimization: {stage: 3}"


def load_file(path: str | os.PathLike[str], example: str = EXAMPLE) -> JsonObject:
    """Read the mapping in a JSON, Hjson or YAML file; the suffix decides, else the first
    character. ``example``: a mapping for the message about a file without one.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        other = "is no regular file" if os.path.lexists(name) else "does not exist"
        what = "is a directory, not a file" if os.path.isdir(name) else other
        raise ConfigError(
            f"config file {name} {what} (looked in {os.path.abspath(name)}); pass the path "
            "of a JSON or YAML file"
        )
    if os.path.getsize(name) > LARGEST:
        raise ConfigError(f"config file {name} has more than {LARGEST:,} bytes; pass another")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {name} is not UTF-8 text ({error}); pass a JSON or YAML file"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"config file {name} cannot be read ({error.strerror}); pass another"
        ) from error
    named = name.endswith(JSON + YAML)
    as_json = name.endswith(JSON) if named else text.lstrip()[:1] == "{"
    try:
        return (load_json if as_json else load_yaml)(text, f"config file {name}", example)
    except ConfigError as error:
        if named:
            raise
        raise ConfigError(f"{error}, or pass the path of a JSON or YAML file") from None


def dump(values: Mapping[str, object], suffix: str) -> str:
    """Return ``values`` as a file's text for its suffix: YAML for .yaml and .yml, else JSON."""
    if suffix in YAML:
        return str(yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False))
    return json.dumps(values, indent=2, default=str) + "\n"


def refuse_existing(path: str | os.PathLike[str], option: str = "with -o") -> None:
    """Raise ConfigError if there is a file or folder at ``path``, which is to be written, or no
    folder to write it in. ``option``: how the command takes another path.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{os.fspath(path)} exists; remove it, or pass another path {option}")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{os.fspath(path)} cannot be written: there is no folder {folder}; make it, or pass "
            f"another path {option}"
        )


def write_new(path: Path, text: str, option: str = "with -o") -> None:
    """Write ``text`` to the new file ``path``. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{os.fspath(path)!r:.300} cannot be written ({error.strerror}); pass another path "
            f"{option}"
        ) from error


def load_json(text: str, label: str, example: str = EXAMPLE) -> dict[str, object]:
    """Parse a mapping from JSON, or from Hjson if it is not valid JSON. Raises ConfigError."""
    with _named(label):
        if not text.strip():
            return _mapping(None, label, example)
        try:
            value = parse_json(text)
        except DuplicateKeyError as error:
            raise ConfigError(f"{label}: {error}; remove one of them") from None
        except json.JSONDecodeError as error:
            try:
                value = parse_hjson(text)
            except HjsonError as other:
                line = text.count("\n", 0, other.position) + 1
                raise ConfigError(
                    f"{label} is not valid JSON: {error.msg} in line {error.lineno}, column "
                    f"{error.colno}; nor Hjson: {other} in line {line}; fix that line"
                ) from None
        return _mapping(value, label, example)


MAX_VALUES = 100_000  # of a configuration; nested aliases of YAML make exponentially many
MAX_KEYS = 1_000  # of a section; an unknown one is compared with all known ones
DEEPEST = 64  # sections in sections
LONGEST = 1024  # bits of a number
LARGEST = 1 << 24  # bytes of a file


@contextmanager
def _named(label: str) -> Iterator[None]:
    """Raise ConfigError for what a parser cannot take: too deep, or a number, a date or a character
    that there is not.
    """
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{label} has sections too deep in each other; write it flat") from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{label} has a value that cannot be read: {error}; fix it") from None


def load_yaml(text: str, label: str, example: str = EXAMPLE) -> JsonObject:
    """Parse a mapping from YAML. Raises ConfigError."""
    with _named(label):
        try:
            value = yaml.load(text, Loader=_Loader)  # a SafeLoader
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            problem = getattr(error, "problem", None) or error
            what = "has" if isinstance(error, _ValueError) else "is not valid YAML:"
            raise ConfigError(f"{label} {what} {problem}{where}; fix that line") from None
        return _mapping(value, label, example)


def _extent(value: object, cache: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Return the number of values in ``value`` with every alias of YAML written out, and how deep
    they lie in each other; both infinite if it holds itself.
    """
    if isinstance(value, int) and value.bit_length() > LONGEST:
        raise ValueError("a number is too long")
    if not isinstance(value, (dict, list)):
        return 1, 0
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise ValueError(f"a section has more than {MAX_KEYS:,} keys")
    if id(value) not in cache:
        cache[id(value)] = math.inf, math.inf  # until all that it holds is counted
        inner = value.values() if isinstance(value, dict) else value
        sizes, depths = zip((0.0, 0.0), *(_extent(item, cache) for item in inner))
        cache[id(value)] = 1 + sum(sizes), 1 + max(depths)
    return cache[id(value)]


def load_text(text: str) -> dict[str, object] | None:
    """Parse the mapping in a JSON string, plain or base64-encoded as launchers pass it on; return
    None for any other string.
    """
    if text.lstrip()[:1] == "{":
        return load_json(text, "config string")
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (UnicodeError, binascii.Error):
        return None
    return load_json(decoded, "config string (base64)") if decoded.lstrip()[:1] == "{" else None


def _mapping(value: object, label: str, example: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        fault = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise ConfigError(
            f"{label} {fault}, not keys and values; write a mapping such as {example}"
        )
    size, depth = _extent(value, {})
    if size > MAX_VALUES:
        raise ConfigError(
            f"{label} holds more than {MAX_VALUES:,} values, those of its aliases counted; write "
            "fewer"
        )
    if depth > DEEPEST:
        raise RecursionError
    return dict(value)


class _ValueError(yaml.constructor.ConstructorError):
    """A value that has no meaning, such as the date 2026-13-45."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that parses ``5e8`` and ``1e-5``, strings in YAML 1.1, as numbers, and rejects
    duplicate keys and numbers whose value differs between YAML 1.1 and 1.2: ``1:30``, ``010``.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            problem = f"the value {node.value!r:.40}, which cannot be read ({error}),"
            raise _ValueError(None, None, problem, node.start_mark) from None
        if isinstance(value, (int, float)) and isinstance(node.value, str):
            other = "text" if ":" in node.value else _decimal(node.value)
            if other not in ("", str(value)):
                problem = (
                    f"the value {node.value!r:.40}, which YAML 1.1 reads as {value} and YAML 1.2 "
                    f"as {other}: write the number, or quote the text,"
                )
                raise _ValueError(None, None, problem, node.start_mark)
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys_seen = set()
        for key, _ in node.value:
            scalar = isinstance(key, yaml.ScalarNode)
            merge = key.tag == "tag:yaml.org,2002:merge"
            value = key.value if merge else self.construct_object(key) if scalar else id(key)
            if value in keys_seen:
                raise yaml.composer.ComposerError(
                    None, None, str(DuplicateKeyError(key.value)), key.start_mark
                )
            keys_seen.add(value)
        return node


def _decimal(written: str) -> str:
    """Return the number that YAML 1.2 reads in octal digits, "" for other text."""
    octal = re.fullmatch(r"([-+]?)0([0-7_]+)", written)
    return str(int(octal[1] + octal[2].replace("_", "") or "0")) if octal else ""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts which :class:`_Loader` would parse as numbers."""


for _both in (_Loader, _Dumper):
    _both.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def yaml_line(value: object) -> str:
    """Return ``value`` as YAML in one line, which :func:`load_yaml` reads back."""
    text = str(yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf))
    first, _, rest = text.partition("\n")
    # a text of several lines has them in YAML, too; JSON, which is YAML, escapes them
    return json.dumps(value) if rest.strip() not in ("", "...") else first
