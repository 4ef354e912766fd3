"""Parsers of configuration text: JSON, Hjson and YAML files, and JSON or Hjson strings.

Each returns a mapping, or raises ConfigError with the position of the mistake.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from hf_zero.config import hjson
from hf_zero.errors import ConfigError


def load_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the mapping in a JSON, Hjson or YAML file; the suffix decides, else the first
    character.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        what = "is a directory, not a file" if os.path.isdir(name) else "does not exist"
        raise ConfigError(
            f"config file {name} {what} (looked in {os.path.abspath(name)}); pass the path "
            "of a JSON or YAML file"
        )
    with open(name, encoding="utf-8") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"config file {name} is not UTF-8 text ({error}); pass a JSON or YAML file"
            ) from error
    as_json = name.endswith((".json", ".hjson")) or (
        not name.endswith((".yaml", ".yml")) and text.lstrip()[:1] == "{"
    )
    return (
        load_json(text, f"config file {name}")
        if as_json
        else load_yaml(text, f"config file {name}")
    )


def load_json(text: str, label: str) -> dict[str, Any]:
    """Parse a mapping from JSON, or from Hjson if it is not valid JSON. Raises ConfigError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(
                f"{label}: the key {twice[0]!r} stands twice in one section; remove one of them"
            )
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        try:
            value = hjson.parse(text)
        except hjson.HjsonError as other:
            line = text.count("\n", 0, other.position) + 1
            raise ConfigError(
                f"{label} is not valid JSON: {error.msg} in line {error.lineno}, column "
                f"{error.colno}; nor Hjson: {other} in line {line}; mend that line"
            ) from error
    return _mapping(value, label)


def load_yaml(text: str, label: str) -> dict[str, Any]:
    """Parse a mapping from YAML. Raises ConfigError."""
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{label} is not valid YAML: {error}; mend that line") from error
    return _mapping(value, label)


def load_text(text: str) -> dict[str, Any] | None:
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


def _mapping(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        held = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise ConfigError(
            f"{label} {held}, not keys and values; write a mapping such as "
            "zero_optimization: {stage: 3}"
        )
    return dict(value)


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys and parses ``5e8`` and ``1e-5``, strings in YAML 1.1,
    as numbers.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one section", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else repr(key))
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
