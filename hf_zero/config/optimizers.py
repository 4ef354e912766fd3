"""The table of optimizers: the classes that run over shards, their names in a configuration, and
what is written beside their arguments.

``optimizers.toml`` is the one place that knows all of them. A class is loaded when it is asked for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.config.feature_rows import with_tuples

TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class OptimizerRow:
    """One class, as ``module:name``; ``optimizers.toml`` explains the fields."""

    cls: str
    names: tuple[str, ...] = ()
    update: str = ""
    keys: Mapping[str, object] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    per_parameter: tuple[str, ...] = ()
    narrow: bool = False
    dialect: str = ""
    groups: str = ""
    adopts: tuple[str, ...] = ()
    begins_with_gradient: bool = False
    feature: str = ""
    idle: Mapping[str, str] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        return self.cls.rpartition(":")[2]


_TABLES: dict[str, Any] = tomllib.loads(TABLE.read_text("utf-8"))

WHOLE: Mapping[str, str] = _TABLES.pop("whole")
"""Why the update of a class, by its name, needs whole tensors."""

STATE_OF: Mapping[str, Sequence[str]] = _TABLES.pop("state_of")
"""The names of classes whose state has the format of another, by the name of that."""

INSTEAD: Mapping[str, str] = _TABLES.pop("instead")
"""What to take instead of an optimizer of a package, by its name."""

OPTIMIZERS: tuple[OptimizerRow, ...] = tuple(
    OptimizerRow(cls, **with_tuples(entry)) for cls, entry in _TABLES.items()
)
NAMED: Mapping[str, OptimizerRow] = {name: row for row in OPTIMIZERS for name in row.names}
"""The rows by each name in a configuration."""


def named(kind: object) -> OptimizerRow | None:
    """Return the row of the optimizer ``kind``, a name in any case; None if there is none."""
    key = str(kind).lower()
    return next((row for name, row in NAMED.items() if name.lower() == key), None)
