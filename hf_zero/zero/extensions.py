"""What the plan of an engine reads of its features, by the rows of ``config/features.toml``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.features import is_on
from hf_zero.zero.gather.gather_source import GatherSource
from hf_zero.zero.layout.engine_plan import PlannedExtensions
from hf_zero.zero.layout.flat_buffer import FlatBuffer


@dataclass(frozen=True)
class Extensions(PlannedExtensions):
    """The extensions of one engine: those that its plan reads, and ``gathers``, which makes the
    source of the gathers of a unit, of its sharded flat buffers and its label.
    """

    gathers: Callable[[Sequence[FlatBuffer], str], GatherSource] | None = None


def extensions_of(config: ZeroConfig, optimizer: torch.optim.Optimizer | None = None) -> Extensions:
    """Return the extensions that ``config`` or ``optimizer`` asks for, by the rows of
    ``config/features.toml``.

    Sequences of several rows are joined; of other fields a later row's value counts.
    """
    values: dict[str, Any] = {}
    joined = {field.name for field in fields(Extensions) if field.default == ()}
    for row in FEATURES.values():
        if row.extends and (is_on(row, config.written) or not row.keys):
            for name, value in row.load(row.extends)(config, optimizer).items():
                values[name] = values.get(name, ()) + value if name in joined else value
    return Extensions(**values)
