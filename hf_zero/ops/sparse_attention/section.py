"""DeepSpeed's JSON section ``sparse_attention`` as a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hf_zero.errors import ConfigError

from .layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

MODES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}


def from_section(section: Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """Build the configuration of a section such as ``{"mode": "bigbird", "block": 64, …}``.

    Without a mode it is "fixed", as in DeepSpeed. A key of another mode has no effect, because
    DeepSpeed's own example lists the keys of all modes; an unknown key or mode, and a value that
    the mode refuses, raise ConfigError.
    """
    mode = section.get("mode", "fixed")
    if mode not in MODES:
        raise ConfigError(
            f"sparse_attention.mode is {mode!r}; it must be one of {', '.join(MODES)}"
        )
    known = {name for kind in MODES.values() for name in _parameters(kind)}
    unknown = [key for key in section if key not in known and key != "mode"]
    if unknown:
        raise ConfigError(
            f"sparse_attention has no key {unknown[0]!r}; it has mode, {', '.join(sorted(known))}"
        )
    taken = _parameters(MODES[mode])
    try:
        return MODES[mode](
            num_heads, **{key: value for key, value in section.items() if key in taken}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sparse_attention with mode {mode!r}: {error}") from error


def _parameters(kind: type[SparsityConfig]) -> list[str]:
    return [
        name
        for name in inspect.signature(kind.__init__).parameters
        if name not in ("self", "num_heads")
    ]
