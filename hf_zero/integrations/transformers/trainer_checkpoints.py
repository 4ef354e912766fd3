"""Wrappers of the Trainer's saves under ZeRO: it ends with the best complete checkpoint, uploads
and counts complete ones, and saves into the memory of the hosts.

The Trainer writes ``checkpoint-N`` in pieces (weights, our folder, schedule, random states,
``trainer_state.json``) and recognizes a folder only by its name. Imported while ``import
transformers`` runs: everything of it is imported inside the functions.
"""

from __future__ import annotations

import glob
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.background_saves import after_commit
from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.retention import excess, remove
from hf_zero.distributed.world_group import barrier, get_world_group
from hf_zero.integrations import finder
from hf_zero.integrations.checkpoint_folders import (
    TRAINER_PREFIX,
    engine_checkpoint_error,
    has_engine_checkpoint,
    numbered_folders,
    trainer_folder_error,
)
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.memory_checkpoints import save_if_due
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_route import engine_of
from hf_zero.logging import logger

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

ASIDE = "_hf-zero-dropped-"  # a name that the Trainer does not push to the hub


def save_into_memory(
    original: Original,
    self: Trainer,
    tr_loss: object,
    grad_norm: object,
    model: nn.Module,
    trial: object,
    epoch: float,
    ignore_keys_for_eval: object,
    start_time: float,
    learning_rate: float | None = None,
) -> None:
    """Wraps ``Trainer._maybe_log_save_evaluate``: saves into the memory of the hosts what
    ``_save_checkpoint`` saves into a folder, at the end of a step at which it is due.
    """
    original(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time,
        learning_rate,
    )  # fmt: skip

    def write(folder: Path) -> Path:
        checkpoint = folder / f"{TRAINER_PREFIX}{self.state.global_step}"
        checkpoint.mkdir()
        with (
            replaced(
                self,
                _get_output_dir=lambda trial: str(folder),
                save_model=lambda *args, **kwargs: None,
                _push_from_checkpoint=lambda folder: None,
            ),
            # it takes no folder as the best checkpoint, and nothing resumes from a model alone
            replaced(self.args, save_strategy="no", save_only_model=False),
        ):
            self._save_checkpoint(model, trial)
        return checkpoint

    engine = engine_of(self)
    if engine is not None:
        save_if_due(engine, write)


def end_with_complete(
    original: Original, self: Trainer, trial: object, num_train_samples: int, start_time: float
) -> object:
    """Wraps ``Trainer._finalize_training``: waits until the last checkpoint is complete, and makes
    the best complete one, with its metric, the best of the Trainer's state.

    A damaged best checkpoint then neither fails a finished training nor makes the limit delete all
    others.
    """
    engine = engine_of(self)
    if engine is not None:
        engine.wait_for_checkpoint()
        is_used = self.args.load_best_model_at_end or self.args.save_total_limit == 1
        best = self.state.best_model_checkpoint
        if best is not None and is_used and not self.args.save_only_model:
            self.state.best_model_checkpoint, self.state.best_metric = decide_on_rank_0(
                get_world_group(), lambda: _best_complete(self, Path(best))
            )
    return original(self, trial, num_train_samples, start_time)


def _best_complete(trainer: Trainer, best: Path) -> tuple[str | None, float | None]:
    """Return ``best`` or, if it is not complete, the complete checkpoint with the best metric, and
    that metric; (None, the current metric) if there is none. Warns of the change.
    """
    state, args = trainer.state, trainer.args
    problem = engine_checkpoint_error(best)
    if not problem:
        return str(best), state.best_metric
    logger.warning("the best checkpoint %s is not complete and is skipped: %s", best, problem)
    name = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
    scores = {
        f"{TRAINER_PREFIX}{entry['step']}": entry[name]
        for entry in state.log_history
        if name in entry and not math.isnan(entry[name])
    }
    scored = [
        (scores[folder.name], folder)
        for folder in numbered_folders(best.parent, TRAINER_PREFIX)
        if folder != best and folder.name in scores
    ]
    for score, folder in sorted(
        scored, key=lambda entry: entry[0], reverse=bool(args.greater_is_better)
    ):
        if not engine_checkpoint_error(folder):
            logger.warning("%s is taken instead: %s %g", folder, name, score)
            return str(folder), score
    logger.warning(
        "no checkpoint with a metric is complete: the model stays as training has left it"
    )
    return None, state.best_metric


def load_by_name(
    original: Original,
    deepspeed_engine: object,
    checkpoint_path: str,
    load_module_strict: bool = True,
) -> None:
    """Wraps ``deepspeed_load_checkpoint``: characters of the path such as brackets stand for
    themselves. It takes the path as a pattern (``glob(f"{path}/global_step*")``) and passes the
    same text to the engine, so the pattern gets an escaped path and the engine the path itself, as
    does its error.
    """
    pattern = glob.escape(checkpoint_path)
    if pattern == checkpoint_path or not is_engine(deepspeed_engine):
        original(deepspeed_engine, checkpoint_path, load_module_strict)
        return
    load = deepspeed_engine.load_checkpoint

    def load_checkpoint(_: str, **options: Any) -> object:
        return load(checkpoint_path, **options)

    try:
        with replaced(deepspeed_engine, load_checkpoint=load_checkpoint):
            original(deepspeed_engine, pattern, load_module_strict)
    except ValueError as error:
        if pattern not in str(error):
            raise
        raise ValueError(str(error).replace(pattern, checkpoint_path)) from None


def push_complete(original: Original, self: Trainer, checkpoint_folder: str) -> None:
    """Wraps ``Trainer._push_from_checkpoint``: uploads a checkpoint once all ranks have written it,
    also with asynchronous saves.
    """
    engine = engine_of(self)
    if engine is not None and self.args.hub_strategy in ("checkpoint", "all_checkpoints"):
        engine.wait_for_checkpoint()
        barrier()
    original(self, checkpoint_folder)


def limit_complete(
    original: Original,
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = "checkpoint",
) -> None:
    """Wraps ``rotate_checkpoints``: ``save_total_limit`` counts complete checkpoints, once the
    newest is complete, and a folder is renamed before it is removed.
    """
    from transformers.trainer_utils import sort_checkpoints

    ordered = [*map(Path, reversed(sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)))]
    limited = save_total_limit is not None and save_total_limit > 0
    if not (limited and finder.chosen() and ordered and has_engine_checkpoint(ordered[0])):
        original(output_dir, save_total_limit, best_model_checkpoint, use_mtime, checkpoint_prefix)
        return
    newest = ordered[0]
    protected = (
        {newest, Path(best_model_checkpoint)} if best_model_checkpoint is not None else {newest}
    )
    first = [folder for folder in ordered if folder in protected]
    limit = max(int(save_total_limit or 1), len(first))
    candidates = [*first, *(folder for folder in ordered if folder not in protected)]
    after_commit(newest, lambda: _remove_excess(candidates, limit, protected))


def _remove_excess(candidates: list[Path], limit: int, protected: set[Path]) -> None:
    """Remove the complete ones of ``candidates``, of which the first is the newest checkpoint,
    after the first ``limit``, and what an earlier removal has left.
    """
    newest = candidates[0]
    for leftover in newest.parent.glob(f"{ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)

    def damage(folder: Path) -> str:
        # Complete without random states: other ranks may still be writing theirs into the newest.
        return engine_checkpoint_error(folder) if folder == newest else trainer_folder_error(folder)

    remove(excess(candidates, limit, protected, damage), ASIDE)
