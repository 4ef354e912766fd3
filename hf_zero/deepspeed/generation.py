"""``deepspeed.zero.unwrap_model_for_generation``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_zero.zero.access.full import summon_full_params


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield ``model`` with all parameters whole: generating gathers nothing (collective)."""
    with summon_full_params(model):
        yield model
