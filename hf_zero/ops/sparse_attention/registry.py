"""Configurations by number, so that an operator takes one as an integer and torch.compile sees
through it.

Equal configurations share a number. They are kept for the life of the process: an operator's
backward may come long after its forward.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layouts import SparsityConfig

_CONFIGS: dict[int, SparsityConfig] = {}
_HANDLES: dict[tuple[type, str], int] = {}
_NUMBERS = itertools.count(1)


def register(config: SparsityConfig) -> int:
    """The number of ``config``, the same for every configuration of its class and content."""
    key = type(config), _content(config.__dict__)
    if key not in _HANDLES:
        _HANDLES[key] = next(_NUMBERS)
        _CONFIGS[_HANDLES[key]] = config
    return _HANDLES[key]


def config_of(handle: int) -> SparsityConfig:
    return _CONFIGS[handle]


def _content(attributes: dict[str, Any]) -> str:
    """A digest of everything that describes a configuration; one that cannot be pickled is like
    itself alone.
    """
    try:
        return hashlib.sha256(pickle.dumps(sorted(attributes.items()))).hexdigest()
    except Exception:  # anything may come of a subclass's attributes
        return f"unpickled {next(_NUMBERS)}"
