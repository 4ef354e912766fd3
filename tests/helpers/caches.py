"""The name of the argument that takes a cache, which depends on the release of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the parameter of ``forward`` that is annotated as a cache."""
    parameters = inspect.signature(forward).parameters.values()
    return next(each.name for each in parameters if "Cache" in str(each.annotation))
