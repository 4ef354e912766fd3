"""Functions of upper layers that lower layers call by name, because imports go down only. Every
module that makes engines imports ``hf_zero.setup.providers``, which registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.errors import ConfigError

_functions: dict[str, Callable[..., Any]] = {}


def register(name: str, function: Callable[..., object]) -> None:
    """Have :func:`registered` return ``function`` for ``name``."""
    _functions[name] = function


def registered(name: str) -> Callable[..., Any]:
    """Return the function of an upper layer with this name. Raises ConfigError if no module has
    registered it.
    """
    if name not in _functions:
        raise ConfigError(
            f"no module has registered {name!r}; import hf_zero.initialize, which imports the "
            "modules that do"
        )
    return _functions[name]
