"""Descriptions of all configuration keys: a JSON schema for editors, a table and a reference for
readers, and the types of ZeroConfig's keywords for type checkers.
"""

from __future__ import annotations

import json
from dataclasses import fields
from textwrap import wrap

from hf_zero.config.accelerate_yaml import ACCELERATE_KEYS, PASSED_ON, SIGNS, TRANSLATED
from hf_zero.config.keys import ALIASES, KEYS, OWN_AUTOS, is_experimental
from hf_zero.config.reading import SWITCHES
from hf_zero.config.settings import Settings
from hf_zero.config.value_types import DTYPE, Key, Status
from hf_zero.logging import JsonObject

DRAFT = "http://json-schema.org/draft-07/schema#"
_ID = "urn:hf-zero:configuration"  # a name; no server publishes the schema, the package holds it
_SHORT: dict[str, JsonObject] = {
    "offload_optimizer": {"enum": ["none", "cpu", "nvme"]},
    "offload_param": {"enum": ["none", "cpu", "nvme"]},
    "compile": {"enum": [False, "blocks"]},
    "activation_offload": {"type": "boolean"},
}


def schema_text() -> str:
    """Return :func:`json_schema` as the text of the package's schema.json."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def json_schema() -> JsonObject:
    """Return the JSON schema of a configuration: DeepSpeed's dialect with our keys, or an
    Accelerate YAML, recognized by its own keys.

    It accepts less than the reader, which also takes other spellings of values (1 for true, CPU)
    and dotted keys.
    """
    return {
        "$schema": DRAFT,
        "$id": _ID,
        "title": "hf-zero configuration",
        "if": {"anyOf": [{"required": [name]} for name in SIGNS]},
        "then": {"$ref": "#/definitions/accelerate"},
        "else": {"$ref": "#/definitions/zero"},
        "definitions": {"zero": _dialect(), "accelerate": _accelerate()},
    }


def _dialect() -> dict[str, object]:
    root: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
    for path, key in KEYS.items():
        _place(root, path, _leaf(key))
    for written, path in ALIASES.items():
        if path in KEYS:
            leaf = _leaf(KEYS[path])
            _place(root, written, {**leaf, "description": f"{path}: {leaf['description']}"})
        else:
            _place(root, written, {"$ref": _pointer(path)})
    for name, short in _SHORT.items():
        schema = root["properties"][name]
        root["properties"][name] = {"anyOf": [schema, short]}
    return root


def _place(root: JsonObject, path: str, leaf: JsonObject) -> None:
    *sections, name = path.split(".")
    node = root
    for section in sections:
        new = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
        node = node["properties"].setdefault(section, new)
        if "$ref" in node:  # an alias of a section: KEYS come first, so its keys are placed
            return
    node["properties"].setdefault(name, leaf)  # an alias never replaces a key


def _pointer(path: str) -> str:
    return "#/definitions/zero/properties/" + "/properties/".join(path.split("."))


def _leaf(key: Key) -> JsonObject:
    values = [_value(key)]
    if key.path != "zero_optimization.stage":
        if key.path not in OWN_AUTOS:
            values.append({"const": "auto"})
        values.append({"type": "null"})  # last: editors propose the values in this order
    leaf: JsonObject = {
        **(values[0] if len(values) == 1 else {"anyOf": values}),
        "description": described(key),
    }
    if key.status is Status.ACTIVE and key.default is not None:
        leaf["default"] = list(key.default) if isinstance(key.default, tuple) else key.default
    return leaf


def _value(key: Key) -> JsonObject:
    if key.members is None:
        return dict(key.value_type.schema)
    return {
        "type": "object",
        "properties": {name: {} for name in sorted(key.members)},
        "additionalProperties": False,
    }


def _accelerate() -> JsonObject:
    top: JsonObject = {}
    inside: JsonObject = {}
    for path, key in ACCELERATE_KEYS.items():
        section, _, name = path.rpartition(".")
        properties = inside if section else top
        schema = key.value_type.schema
        properties[name] = {"anyOf": [dict(schema), {"type": "null"}]} if schema else {}
        properties[name]["description"] = described(key)
    for name, path in TRANSLATED.items():
        inside[name] = _leaf(KEYS[path])
    for name in PASSED_ON:
        inside[name] = {"$ref": f"#/definitions/zero/properties/{name}"}
    top["deepspeed_config"] = {
        "type": ["object", "null"],
        "properties": inside,
        "additionalProperties": False,
    }
    return {"type": "object", "properties": top, "additionalProperties": False}


def described(key: Key) -> str:
    """Return the effect of a key, or the reason why it has none."""
    if key.status is Status.INERT:
        return f"No effect: {key.note}."
    if key.status is Status.NOT_BUILT:
        return f"Not built: {key.note}."
    unit = f" [{key.unit}]" if key.unit else ""
    return f"{key.note}{unit}"


def table() -> str:
    """Return a Markdown table of all keys of the dialect."""
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for path, key in KEYS.items():
        default = "" if key.default is None or key.default == () else f"`{_shown(key.default)}`"
        value = key.value_type.expected.replace("|", "\\|")
        shown = default if key.status is Status.ACTIVE else ""
        meaning = described(key).replace("|", "\\|")
        lines.append(f"| `{path}` | {value} | {shown} | {meaning} |")
    return "\n".join(lines)


def reference() -> str:
    """Return Markdown with a heading for each section of the dialect and an item for each of its
    keys: those that act, those without effect, those that are not built.
    """
    by_section: dict[str, list[Key]] = {}
    for path, key in KEYS.items():
        by_section.setdefault(path.rpartition(".")[0], []).append(key)
    parts = []
    for section in sorted(by_section):
        parts.append(f"## `{section}`" if section else "## Top level")
        rows = sorted(by_section[section], key=lambda key: list(Status).index(key.status))
        parts.append("\n".join(map(_item, rows)))
    return "\n\n".join(parts)


def _item(key: Key) -> str:
    meaning = described(key)
    value, default = "", ""
    if key.status is Status.ACTIVE:
        value = f"{key.value_type.expected}. "
        if key.default not in (None, ()):
            default = f" Default: `{_shown(key.default)}`."
    ending = "" if meaning.endswith(".") else "."
    if is_experimental(key.path):
        default += " Experimental."
    text = f"- **`{key.path.rpartition('.')[2]}`**: {value}{_sentence(meaning)}{ending}{default}"
    return "\n".join(wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False))


def _sentence(text: str) -> str:
    first = text.partition(" ")[0]
    return text if "_" in first or "." in first or "(" in first else text[:1].upper() + text[1:]


_TYPES = {
    "integer": "int", "number": "float", "boolean": "bool", "string": "str",
    "object": "Mapping[str, object]",
}  # fmt: skip


def keywords() -> str:
    """Return the module with the keywords of :class:`ZeroConfig`, as a ``TypedDict``."""
    by_field = {key.field: key for key in KEYS.values()}
    modules: set[str] = set()
    lines = []
    for item in fields(Settings):
        if item.name == "stage":
            continue
        types: list[str] = []
        if "section" in item.metadata:
            path, made_of = item.metadata["section"]
            short = _python(_SHORT[item.name]) if item.name in _SHORT else []
            package, _, module = made_of.__module__.rpartition(".")
            modules.add(f"from {package} import {module}")
            types = [f"{module}.{made_of.__name__}", "Mapping[str, object]", *short]
            types += ["bool"] if item.name in SWITCHES else []
            text = f"The section ``{path}``." if path else ""
        else:
            row = by_field[item.name]
            text = described(row)
            types = ["Dtype"] if row.value_type is DTYPE else _python(row.value_type.schema)
        lines += _keyword(item.name, types, text)
    alias = KEYS[ALIASES["prefetch_bucket_size"]]
    lines += _keyword("prefetch_bucket_size", _python(alias.value_type.schema), described(alias))
    dtype = f"Dtype: TypeAlias = {' | '.join([*_python(DTYPE.schema), 'torch.dtype'])}"
    head = [*_HEAD, *(f"    {line}" for line in [*sorted(modules), "", dtype])]
    return "\n".join([*head, "", "", "class Keywords(TypedDict, total=False):", *lines]) + "\n"


_HEAD = (
    '"""Keywords of :class:`hf_zero.ZeroConfig` with their types, for editors and type checkers;',
    "``scripts/readme.py`` writes this file.",
    '"""',
    "",
    "from __future__ import annotations",
    "",
    "from collections.abc import Mapping, Sequence",
    "from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict",
    "",
    "if TYPE_CHECKING:",
    "    import torch",
    "",
)


def _python(schema: JsonObject) -> list[str]:
    """Return the Python types of the values that a JSON schema allows."""
    if "anyOf" in schema:
        return [name for part in schema["anyOf"] for name in _python(part)]
    if "enum" in schema:
        return [f"Literal[{', '.join(map(repr, schema['enum']))}]"]
    if "const" in schema:
        return [f"Literal[{schema['const']!r}]"]
    if schema.get("type") == "array":
        return [f"Sequence[{' | '.join(_python(schema['items']))}]"]
    return [_TYPES[schema["type"]]] if "type" in schema else (["object"] if not schema else [])


def _keyword(name: str, types: list[str], text: str) -> list[str]:
    return [f"    {name}: {' | '.join(dict.fromkeys([*types, 'None']))}", *_quoted(text)]


def _quoted(text: str) -> list[str]:
    lines = wrap(text, 90) or [""]
    if len(lines) == 1:
        return [f'    """{text}"""'] if text else []
    return [f'    """{lines[0]}', *(f"    {line}" for line in lines[1:]), '    """']


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
