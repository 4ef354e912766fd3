"""Wrappers of Lightning's checkpoints under ZeRO: a run resumes from, keeps and ends with complete
ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from hf_zero.checkpoint import find
from hf_zero.checkpoint.background_saves import after_commit
from hf_zero.checkpoint.memory import checkpoints_of, newest
from hf_zero.checkpoint.retention import remove
from hf_zero.config import ZeroConfig
from hf_zero.config.memory import MemorySection
from hf_zero.engine import Engine
from hf_zero.errors import CheckpointError
from hf_zero.integrations import finder
from hf_zero.integrations.checkpoint_folders import (
    engine_checkpoint_error,
    has_engine_checkpoint,
    last_complete,
    numbered_folders,
)
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.lightning.strategy import StrategyMethods
from hf_zero.integrations.seams import Original
from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
    from lightning.pytorch.trainer.states import TrainerFn


LAST = "_hf_zero_last"  # whether a connector was asked for the last checkpoint, not for a named one
DAMAGE = "_hf_zero_damage"  # why no last checkpoint on disk can be loaded; memory is asked first
# saved by a job that is asked to end; a SLURM job resumes from it automatically
HPC = "hpc_ckpt_"


def find_complete(original: Original, self: ModelCheckpoint, trainer: Trainer) -> set[str]:
    """Wraps ``ModelCheckpoint._find_last_checkpoints``: ``ckpt_path="last"`` finds a complete
    folder; incomplete ones are skipped with a warning.

    If none named last is complete, the newest complete checkpoint of the callback is used. Raises
    CheckpointError if there is none: the run would otherwise start from scratch, and overwrite what
    is left.
    """
    paths: set[str] = original(self, trainer)
    if not _under_zero(trainer.strategy):
        return paths
    root = Path(trainer.default_root_dir)
    paths |= {str(path) for path in numbered_folders(root, HPC, self.FILE_EXTENSION)}
    complete = {path for path in paths if not (Path(path).is_dir() and _skipped(Path(path)))}
    if complete or not paths:
        return complete
    parent = Path(next(iter(paths))).parent
    complete = {
        str(item)
        for item in _beside(parent, self.FILE_EXTENSION)
        if str(item) not in paths and not _skipped(item)
    }
    if not complete:
        raise CheckpointError(
            f"none of the checkpoints in {parent} is complete "
            f"({', '.join(sorted(Path(path).name for path in paths))} neither); "
            "restore one, or start from scratch without ckpt_path"
        )
    return complete


def refuse_incomplete(
    original: Original,
    self: _CheckpointConnector,
    state_fn: TrainerFn,
    ckpt_path: str | Path | None,
    model_provided: bool,
    model_connected: bool,
) -> str | Path | None:
    """Wraps ``_CheckpointConnector._parse_ckpt_path``: a folder loaded by name, or as the best,
    must be complete.

    Raises CheckpointError that lists the complete ones beside it: a model other than the best must
    not be loaded silently. Of the folders saved when SLURM asked a job to end, the last complete
    one is loaded.
    """
    setattr(self, DAMAGE, None)
    setattr(self, LAST, ckpt_path == "last")
    strategy = self.trainer.strategy
    try:
        path = original(self, state_fn, ckpt_path, model_provided, model_connected)
        hpc = ckpt_path in (None, "hpc") and path is not None and Path(path).name.startswith(HPC)
        setattr(self, LAST, ckpt_path == "last" or hpc)
        if path is None or not _under_zero(strategy) or not Path(path).is_dir():
            return path
        folder = Path(path)
        if hpc:
            numbered = numbered_folders(folder.parent, HPC, folder.suffix)
            return str(last_complete(numbered, engine_checkpoint_error))
    except CheckpointError as error:
        if not (getattr(self, LAST) and state_fn == "fit" and _saves_into_memory(strategy)):
            raise
        setattr(self, DAMAGE, error)
        return None
    # for any other folder the engine's own error is more specific
    problem = engine_checkpoint_error(folder) if has_engine_checkpoint(folder) else ""
    if problem:
        others = [
            str(item)
            for item in _beside(folder.parent, folder.suffix)
            if item != folder and not engine_checkpoint_error(item)
        ]
        remedy = "no other one there is complete"
        if others:
            remedy = f"complete, the newest first: {', '.join(others)}; pass one as ckpt_path"
        raise CheckpointError(
            f"{folder}{' (the best)' if ckpt_path == 'best' else ''} is not complete: {problem}. "
            f"In {folder.parent}, {remedy}"
        )
    return path


def resume_from_memory(
    original: Original,
    self: _CheckpointConnector,
    checkpoint_path: str | Path | None = None,
    weights_only: bool | None = None,
) -> None:
    """Wraps ``_CheckpointConnector.resume_start``: ``ckpt_path="last"``, and a SLURM job that goes
    on by itself, resume from the newest of memory and disk.
    """
    trainer = self.trainer
    engine = getattr(trainer.strategy, "engine", None)
    checkpoint, damage = None, getattr(self, DAMAGE, None)
    setattr(self, DAMAGE, None)
    if (
        isinstance(engine, Engine)
        and checkpoints_of(engine) is not None
        and trainer.state.fn == "fit"
        and getattr(self, LAST, False)
    ):
        checkpoint = newest(engine, checkpoint_path, run=trainer.default_root_dir)
        if checkpoint is not None and checkpoint.in_memory:
            log_rank0(f"resume from step {checkpoint.step} in the memory of the hosts")
            checkpoint_path = str(checkpoint.directory)
    if checkpoint is None and damage is not None:
        raise damage
    original(self, checkpoint_path, weights_only)


def _under_zero(strategy: object) -> TypeGuard[StrategyMethods | DeepSpeedStrategy]:
    return isinstance(strategy, StrategyMethods) or (
        finder.chosen() and type(strategy).__name__ == "DeepSpeedStrategy"
    )


def _saves_into_memory(strategy: Strategy) -> bool:
    if not isinstance(strategy, StrategyMethods):  # resume_from_memory knows these alone
        return False
    settings = ZeroConfig.coerce(strategy.zero_config or {}, allow_auto=True, foreign=True)
    return bool(settings.section_of(MemorySection).every)


def _beside(parent: Path, extension: str) -> list[Path]:
    """Return the folders in ``parent`` that Lightning may have saved, newest first."""
    siblings = (
        item
        for item in parent.glob(f"*{extension}")
        if item.is_dir() and not item.name.startswith(".")
    )
    order = {
        folder: at
        for at, checkpoint in enumerate(find.checkpoints_below(parent))
        for folder in (checkpoint, *checkpoint.parents)
    }
    return sorted(siblings, key=lambda item: order.get(item, -1), reverse=True)


def _skipped(folder: Path) -> bool:
    problem = engine_checkpoint_error(folder)
    if problem:
        log_rank0(f"{folder} is not complete and is skipped: {problem}", logging.WARNING)
    return bool(problem)


def remove_once_replaced(original: Original, self: Strategy, filepath: str | Path) -> None:
    """Wraps ``Strategy.remove_checkpoint``: removes an old folder once the new one is complete,
    after a rename.
    """
    folder = Path(filepath)
    if not is_engine(self.model) or not folder.is_dir() or folder.is_symlink():
        original(self, filepath)
    elif self.is_global_zero:
        after_commit(folder.parent, lambda: remove([folder]))


def end_with_complete(original: Original, self: Strategy) -> None:
    """Wraps ``Strategy.on_train_end``: waits until the last checkpoint is complete."""
    if is_engine(self.model):
        self.model.wait_for_checkpoint()
    original(self)


def leave_weights_in_shards(
    original: Callable[[Strategy], dict[str, object]], self: Strategy
) -> dict[str, object]:
    """Wraps ``Strategy.lightning_module_state_dict``: returns an empty dict under
    DeepSpeedStrategy, which drops the weights from its checkpoints anyway.
    """
    return {} if is_engine(self.model) else original(self)
