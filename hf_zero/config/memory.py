"""Configuration of checkpoints in the memory of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.value_types import BYTES, PATH, TEXT, integer, key


def _without_memory(values: Mapping[str, object]) -> str:
    return "" if values.get("checkpoint.memory.every") else "checkpoint.memory.every is not set"


@dataclass(frozen=True)
class MemorySection(FeatureSection):
    """Checkpoints in the memory of hosts. ``every`` None: none are made; ``limit`` in bytes on a
    host; ``folder`` None: a tmpfs, else a local folder.
    """

    FIELD, SECTION_PATH = "memory_checkpoints", "checkpoint.memory"

    every: int | None = key(integer(1), None, unit="steps")
    copies: int = key(integer(1), 2, unit="hosts", idle=_without_memory)
    limit: int | None = key(BYTES, None, unit="bytes", idle=_without_memory)
    folder: str | None = key(PATH, None, idle=_without_memory)
    job: str | None = key(TEXT, None, idle=_without_memory)
