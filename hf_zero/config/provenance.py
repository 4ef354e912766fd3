"""Where values stood, through the hands of libraries that take a configuration as a dict, copy
it and fill in values of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

DICT = "config dict"
DEFAULT = "default"


class SourcedDict(dict[str, Any]):
    """A configuration in DeepSpeed's dialect that remembers ``written``: by dotted path, each value
    and where it stood.

    A value that is not there any more as it was written, or never was, is that of ``filler``.
    Copies remember, too.
    """

    written: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    filler: str = DICT

    @classmethod
    def of(cls, mapping: Mapping[str, Any], label: str) -> SourcedDict:
        """``mapping``, every value of which stands in ``label``; as it is, if it remembers
        already.
        """
        if isinstance(mapping, cls):
            return mapping
        return cls(mapping).remember(
            {path: (value, f"{label}: {path}") for path, value in flattened(mapping)}
        )

    def remember(self, written: Mapping[str, tuple[Any, str]], filler: str = DICT) -> SourcedDict:
        """This dict, with other memories."""
        self.written, self.filler = dict(written), filler
        return self

    def source_of(self, path: str, value: Any, usual: bool) -> str:
        """Where ``value`` at ``path`` comes from.

        ``usual``: it changes nothing, so that a filler may have written it by habit.
        """
        before, source = self.written.get(path, (None, ""))
        if source and (before is value or before == value):
            return source
        if self.filler == DICT:
            return f"{DICT}: {path}"
        return f"{DEFAULT}: {self.filler} writes it" if usual else self.filler


def flattened(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of all leaves."""
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield path, value  # a section may be taken as a whole
            yield from flattened(value, f"{path}.")
        else:
            yield path, value


def is_written(source: str) -> bool:
    """Whether a value of this source was written, or computed from what was."""
    return not source.startswith(DEFAULT)


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None if there is none."""
    node: Any = config
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
