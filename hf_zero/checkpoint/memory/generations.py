"""Checkpoints in the memory of hosts as the generations of an engine."""

from __future__ import annotations

from collections.abc import Collection

from hf_zero.checkpoint.generations import Folder, Newest
from hf_zero.checkpoint.memory.choose import choose_checkpoint, newest_in_memory
from hf_zero.checkpoint.memory.saving import MemoryCheckpoints
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.config import ZeroConfig


class GenerationsInMemory(MemoryCheckpoints):
    """Checkpoints in memory, with the choice between them and those on disk."""

    @classmethod
    def newest(
        cls,
        config: ZeroConfig,
        directory: Folder | None = None,
        tag: str | None = None,
        run: Folder | None = None,
        skipped: Collection[str] = (),
    ) -> Newest | None:
        return newest_in_memory(config, directory, tag, run, skipped)

    def choose(
        self, engine: SavedEngine, directory: Folder, tag: str | None, strict: bool, resumes: bool
    ) -> Newest:
        return choose_checkpoint(engine, directory, tag, strict, resumes)
