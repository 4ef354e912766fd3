"""The wrappers around ``Accelerator.save_state`` and ``load_state`` where Accelerate names the folders itself.

Imported in the middle of ``import accelerate``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.folders import DROPPED
from hf_zero.checkpoint.retention import excess, remove
from hf_zero.integrations import finder
from hf_zero.integrations.written_in_pieces import accelerators, by_number, decided, last_whole

PREFIX = "checkpoint_"


def _under_zero(accelerator: Any) -> bool:
    return finder.chosen() and accelerator.distributed_type == "DEEPSPEED" and accelerator.project_configuration.automatic_checkpoint_naming


def _states(accelerator: Any) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def keep_until_saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """``total_limit`` removes old states once the new one is whole, and not before it is begun (``Accelerator.save_state``)."""

    def save_state(self: Any, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        settings = self.project_configuration
        limit = settings.total_limit
        if limit is None or not _under_zero(self):
            return original(self, output_dir, safe_serialization, **save_model_func_kwargs)
        settings.total_limit = None
        try:
            location = original(self, output_dir, safe_serialization, **save_model_func_kwargs)
        finally:
            settings.total_limit = limit
        self.wait_for_everyone()
        if self.is_main_process:
            _keep(self, Path(location), limit)
        self.wait_for_everyone()
        return location

    return save_state


def _keep(accelerator: Any, newest: Path, limit: int) -> None:
    parent = newest.parent
    for left in parent.parent.glob(f"{DROPPED}*"):
        shutil.rmtree(left, ignore_errors=True)
    older = [folder for folder in by_number(parent, PREFIX) if folder != newest]
    chosen = excess([newest, *older], max(limit, 1), {newest}, lambda folder: accelerators(folder, accelerator))
    remove(chosen, os.path.join(os.pardir, DROPPED))  # what lies in this folder counts as a state


def resume_from_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Without a folder the last whole state is loaded; torn ones are skipped and named (``Accelerator.load_state``)."""

    def load_state(self: Any, input_dir: str | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> Any:
        if input_dir is None and _under_zero(self):
            found = decided(lambda: last_whole(by_number(_states(self), PREFIX), lambda folder: accelerators(folder, self)))
            input_dir = None if found is None else str(found)
        return original(self, input_dir, load_kwargs, **load_model_func_kwargs)

    return load_state
