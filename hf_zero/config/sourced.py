"""Configurations as nested dicts: one that keeps the source of each value while libraries copy it
and fill in values; values by dotted path, and values in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from hf_zero.logging import JsonObject

DICT = "config dict"
DEFAULT = "default"
FILES = ("config file", "config string")  # first words of the sources that are not Python


class SourcedDict(dict[str, Any]):
    """A configuration in DeepSpeed's dialect with the source of each value. ``written`` maps a
    dotted path to the value as written and its source.

    A value that was changed or added since is attributed to ``filler``. Copies keep the sources.
    """

    written: Mapping[str, tuple[object, str]] = MappingProxyType({})
    filler: str = DICT

    @classmethod
    def wrap(cls, mapping: Mapping[str, object], label: str) -> SourcedDict:
        """Wrap ``mapping``, unless it is a SourcedDict; ``label``: the source of each value."""
        if isinstance(mapping, cls):
            return mapping
        return cls(mapping).remember(
            {path: (value, f"{label}: {path}") for path, value in flattened(mapping)}
        )

    def remember(
        self, written: Mapping[str, tuple[object, str]], filler: str = DICT
    ) -> SourcedDict:
        """Replace the recorded sources and the filler of this dict, and return it."""
        self.written, self.filler = dict(written), filler
        return self

    def label_of(self, path: str, label: str) -> str:
        """Return the file that the key at ``path`` comes from, or ``label`` if it is not known."""
        source = self.written.get(path, (None, ""))[1]
        return source.removesuffix(f": {path}") if source.endswith(f": {path}") else label

    def source_of(self, path: str, value: object, usual: bool) -> str:
        """Return the source of ``value`` at ``path``.

        ``usual``: the value has no effect, so a filler may have written it by habit.
        """
        before, source = self.written.get(path, (None, ""))
        if source and (before is value or before == value):
            return source
        if self.filler == DICT:
            return f"{DICT}: {path}"
        return f"{DEFAULT}: {self.filler} writes it" if usual else self.filler


def flattened(mapping: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted path and value of each leaf and of each section."""
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield path, value  # a section may be taken as a whole
            yield from flattened(value, f"{path}.")
        else:
            yield path, value


def merge(into: JsonObject, more: Mapping[str, object]) -> dict[str, object]:
    """Write the values of ``more`` into ``into``, section by section, and return it."""
    for name, value in more.items():
        section = into.get(name)
        if isinstance(section, dict) and isinstance(value, Mapping):
            merge(section, value)
        else:
            into[name] = value
    return into


def shown(value: object, source: str = "config file") -> str:
    """Return ``value`` as a configuration of this source writes it: JSON, which YAML reads too, in
    a file, else Python with the name of the type.
    """
    if source.startswith(FILES):
        return json.dumps(value, ensure_ascii=False, default=str)
    return repr(value)


def is_written(source: str) -> bool:
    """Return whether a value with this source was written, or computed from written values."""
    return not source.startswith(DEFAULT)


def value_at(config: Mapping[str, object], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    node: object = config
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
