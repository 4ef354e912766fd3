"""Wrappers of the Trainer's checkpoints: a run resumes from, ends with and keeps complete ones.

The Trainer writes ``checkpoint-N`` in pieces (weights, our folder, schedule, random states,
``trainer_state.json``) and recognizes a folder only by its name. Imported while ``import
transformers`` runs: everything of it is imported inside the functions.
"""

from __future__ import annotations

import glob
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint import find
from hf_zero.checkpoint.background_saves import after_commit
from hf_zero.checkpoint.commit import excess, remove
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.memory import newest_in_memory
from hf_zero.checkpoint.storage import decide_on_rank_0
from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import ACCUMULATION, TOTAL
from hf_zero.distributed.world_group import barrier, get_world_group
from hf_zero.errors import CheckpointError
from hf_zero.integrations import finder
from hf_zero.integrations.checkpoint_folders import (
    STATE,
    engine_checkpoint_error,
    has_engine_checkpoint,
    last_complete,
    numbered_folders,
    on_disk_or_damage,
    trainer_folder_error,
    warn_lost_random_states,
    written_otherwise,
)
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.memory_checkpoints import save_if_due
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_phases import windows_of
from hf_zero.integrations.transformers.trainer_route import engine_of, output_folder, under_zero
from hf_zero.logging import counted, listed, log_rank0, logger

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

PREFIX = "checkpoint-"
TRUTHS = {"True": True, "true": True, "False": False, "false": False}
MARK = "_hf_zero_mark"  # an attribute of a Trainer until its engine marks what it loads
ASIDE = "_hf-zero-dropped-"  # a name that the Trainer does not push to the hub


def whole_to_resume(trainer: Trainer, resume: str | bool | None) -> str | bool | None:
    """Return the checkpoint that ``Trainer.train(resume_from_checkpoint=resume)`` resumes from: for
    True (also as text), and for the last one in ``output_dir``, the newest of the last complete one
    and of those in the memory of the hosts. Collective.

    Raises CheckpointError for an incomplete checkpoint, naming the last complete one, and if there
    are checkpoints and none is complete, in memory neither.
    """
    if resume is None or resume is False:
        return resume
    output = output_folder(trainer.args)
    truth = TRUTHS.get(resume) if isinstance(resume, str) and not Path(resume).exists() else None
    if truth is not None:
        log_rank0(
            f"resume_from_checkpoint={resume!r} is text, as a command line gives it, and no "
            "such folder exists: "
            + (f"resuming from the last checkpoint in {output}" if truth else "not resuming")
        )
        resume = truth
    if resume is False:
        return resume
    damage: CheckpointError | None = None
    if resume is True:
        last = True
        folder, damage = on_disk_or_damage(
            lambda: last_complete(numbered_folders(output, PREFIX), trainer_folder_error)
        )
    else:
        named = folder = Path(resume)
        last = decide_on_rank_0(get_world_group(), lambda: _refuse_torn(named, output))
    if last:  # what scripts find by get_last_checkpoint counts as True
        folder = _newer_in_memory(trainer, folder)
    if folder is None and damage is not None:
        raise damage
    if folder is None:
        return resume  # the Trainer raises that there is none
    resumed = folder
    checkpoint = decide_on_rank_0(
        get_world_group(),
        lambda: (
            find.locate(resumed) if resumed.is_dir() and has_engine_checkpoint(resumed) else None
        ),
    )
    if checkpoint is not None:
        rank, ranks = trainer.args.process_index, trainer.args.world_size
        name = f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        warn_lost_random_states(folder, Path(str(checkpoint)), name, rank, ranks)
        _keep_samples_of_a_step(trainer, folder)
    return str(folder)


def _newer_in_memory(trainer: Trainer, folder: Path | None) -> Path | None:
    """Return the newest generation's folder in memory, unless ``folder`` is newer. Collective."""
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    checkpoint = newest_in_memory(
        ZeroConfig.coerce(config, allow_auto=True, foreign=True),
        folder,
        run=output_folder(trainer.args),
    )
    if checkpoint is None:
        return folder
    log_rank0(f"resume from step {checkpoint.step} in the memory of the hosts")
    setattr(trainer, MARK, checkpoint.marks)
    return Path(str(checkpoint.directory))


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
        checkpoint = folder / f"{PREFIX}{self.state.global_step}"
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


def _keep_samples_of_a_step(trainer: Trainer, folder: Path) -> None:
    """Set ``gradient_accumulation_steps``, in the arguments and the configuration, so that on
    another number of data-parallel ranks a step has the samples that it had in ``folder``; log
    the settings that give it others. Collective. Raises ConfigError if the micro-batches do not
    divide them.
    """
    if windows_of(trainer) is not None:
        return  # training_phases say how many samples each step has

    def batch_of() -> dict[str, int]:
        path = find.locate(folder) / MANIFEST_NAME
        return Manifest.read(path).batch if path.is_file() else {}

    saved, args = decide_on_rank_0(get_world_group(), batch_of), trainer.args
    readers = args.world_size // trainer.get_tp_size() // trainer.get_sp_size()
    micro = args.per_device_train_batch_size
    if not saved or readers == saved["readers"]:
        return
    if micro * readers * args.gradient_accumulation_steps != saved["samples"]:
        from hf_zero.checkpoint.resume import micro_batches

        steps = micro_batches(saved, micro, readers, str(folder), "per_device_train_batch_size")
        args.gradient_accumulation_steps = steps
        plugin = trainer.accelerator.state.deepspeed_plugin
        plugin.gradient_accumulation_steps = steps
        config = plugin.hf_ds_config.config
        config[ACCUMULATION] = steps
        if isinstance(config.get(TOTAL), int):
            config[TOTAL] = micro * steps * args.world_size
    _warn_other_rows(trainer, saved, readers)


def _warn_other_rows(trainer: Trainer, saved: dict[str, int], readers: int) -> None:
    """Log the settings under which ``readers`` data-parallel ranks read other rows than those of
    ``saved`` (``batch`` of the manifest) would have.
    """
    from torch.utils.data import IterableDataset

    args, data, before = trainer.args, trainer.train_dataset, saved["readers"]
    accelerator, causes = trainer.accelerator, []
    if isinstance(data, IterableDataset):
        fewest = min(ranks for ranks in (before, readers) if ranks > 1)
        sharded = accelerator.dispatch_batches is False and not accelerator.split_batches
        if sharded and getattr(data, "num_shards", 1) >= fewest:
            causes.append("dispatch_batches=False gives each rank shards of its own")
    elif data is not None:
        if args.train_sampling_strategy == "group_by_length":
            causes.append("train_sampling_strategy='group_by_length' sorts the rows of one rank")
        micro, rows = args.per_device_train_batch_size, len(data)  # type: ignore[arg-type]

        def rows_of_epoch(ranks: int, micro_batch: int) -> int:
            together = micro_batch * ranks
            if args.dataloader_drop_last:
                return rows // together * together
            fills = accelerator.even_batches and ranks > 1  # with repeated rows
            return -(-rows // together) * together if fills else rows

        had, has = rows_of_epoch(before, saved["micro_batch"]), rows_of_epoch(readers, micro)
        if args.dataloader_drop_last and had != has:
            causes.append(f"dataloader_drop_last leaves an epoch {has} rows, {had} before")
        elif had != has and not accelerator.dispatch_batches:
            causes.append(
                f"Accelerate fills the last step of an epoch up to {has} rows, {had} before"
            )
    if causes:
        log_rank0(
            f"resume on {counted(readers, 'data-parallel rank')}, {before} before: steps train on "
            "other rows than they would have, some of them again, because "
            f"{' and '.join(causes)}; resume on {before}, or begin a run without that setting, "
            "where this matters",
            logging.WARNING,
        )


def _refuse_torn(folder: Path, output: Path) -> bool:
    """Raise CheckpointError unless ``folder`` is a whole checkpoint of the Trainer; return whether
    it is the last one of the run in ``output``.
    """
    if not folder.exists():
        names = [checkpoint.name for checkpoint in numbered_folders(output, PREFIX)]
        raise CheckpointError(
            f"resume_from_checkpoint={str(folder)!r}: there is no such folder (looked for "
            f"{folder.resolve()}); {output} holds {listed(names) or 'no checkpoint'}: pass the "
            "path of one, or True for the last"
        )
    if not (folder.is_dir() and (has_engine_checkpoint(folder) or (folder / STATE).is_file())):
        return False  # not written by the Trainer: its own error is more specific
    if otherwise := written_otherwise(folder):
        raise CheckpointError(f"resume_from_checkpoint: {otherwise}")
    problem = trainer_folder_error(folder)
    if problem:
        whole = next(
            (
                checkpoint
                for checkpoint in numbered_folders(folder.parent, PREFIX)
                if checkpoint != folder and not trainer_folder_error(checkpoint)
            ),
            None,
        )
        remedy = (
            f"{whole} is whole" if whole else f"No other checkpoint in {folder.parent} is whole"
        )
        raise CheckpointError(f"{folder} is not whole: {problem}. {remedy}")
    return folder.resolve() in [c.resolve() for c in numbered_folders(output, PREFIX)[:1]]


def end_with_whole_ones(
    original: Original, self: Trainer, trial: object, num_train_samples: int, start_time: float
) -> object:
    """Wraps ``Trainer._finalize_training``: waits until the last checkpoint is complete, and
    selects the best among the complete ones.

    A damaged best checkpoint then neither fails a finished training nor makes the limit delete all
    others.
    """
    engine = engine_of(self)
    if engine is not None:
        engine.wait_for_checkpoint()
        used = self.args.load_best_model_at_end or self.args.save_total_limit == 1
        best = self.state.best_model_checkpoint
        if best is not None and used and not self.args.save_only_model:
            self.state.best_model_checkpoint, self.state.best_metric = decide_on_rank_0(
                get_world_group(), lambda: _best_whole(self, Path(best))
            )
    return original(self, trial, num_train_samples, start_time)


def load_by_name(
    original: Original,
    deepspeed_engine: object,
    checkpoint_path: str,
    load_module_strict: bool = True,
) -> None:
    """Wraps ``deepspeed_load_checkpoint``, which takes the path for a pattern: characters such as
    brackets stand for themselves.
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


def push_whole_ones(original: Original, self: Trainer, checkpoint_folder: str) -> None:
    """Wraps ``Trainer._push_from_checkpoint``: uploads a checkpoint once all ranks have written it,
    also with asynchronous saves.
    """
    engine = engine_of(self)
    if engine is not None and self.args.hub_strategy in ("checkpoint", "all_checkpoints"):
        engine.wait_for_checkpoint()
        barrier()
    original(self, checkpoint_folder)


def _best_whole(trainer: Trainer, best: Path) -> tuple[str | None, float | None]:
    """Return ``best`` or, if it is not complete, the best complete checkpoint, and its metric;
    (None, the current metric) if there is none.
    """
    state, args = trainer.state, trainer.args
    problem = engine_checkpoint_error(best)
    if not problem:
        return str(best), state.best_metric
    logger.warning("the best checkpoint %s is not whole and is skipped: %s", best, problem)
    name = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
    scores = {entry["step"]: entry[name] for entry in state.log_history if name in entry}
    others = [
        folder
        for folder in numbered_folders(best.parent, PREFIX)
        if folder != best and _step(folder) in scores
    ]
    for folder in sorted(
        others, key=lambda c: scores[_step(c)], reverse=bool(args.greater_is_better)
    ):
        if not engine_checkpoint_error(folder):
            logger.warning("%s is taken instead: %s %g", folder, name, scores[_step(folder)])
            return str(folder), scores[_step(folder)]
    logger.warning("no checkpoint with a metric is whole: the model stays as training has left it")
    return None, state.best_metric


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def keep_whole_ones(
    original: Original,
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = "checkpoint",
) -> None:
    """Wraps ``rotate_checkpoints``: ``save_total_limit`` counts complete checkpoints, and a folder
    is renamed before it is removed.
    """
    from transformers.trainer_utils import sort_checkpoints

    ordered = [
        Path(p) for p in reversed(sort_checkpoints(output_dir, checkpoint_prefix, use_mtime))
    ]
    limited = save_total_limit is not None and save_total_limit > 0
    if not (limited and finder.chosen() and ordered and has_engine_checkpoint(ordered[0])):
        original(output_dir, save_total_limit, best_model_checkpoint, use_mtime, checkpoint_prefix)
        return
    newest = ordered[0]
    protected = (
        {newest, Path(best_model_checkpoint)} if best_model_checkpoint is not None else {newest}
    )
    first = [folder for folder in ordered if folder in protected]
    keep = max(int(save_total_limit or 1), len(first))
    candidates = [*first, *(folder for folder in ordered if folder not in protected)]
    after_commit(newest, lambda: _keep(candidates, keep, protected))


def _keep(newest_first: list[Path], keep: int, protected: set[Path]) -> None:
    newest = newest_first[0]
    for leftover in newest.parent.glob(f"{ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Complete without random states: other ranks may still be writing theirs into the newest.
    remove(
        excess(
            newest_first,
            keep,
            protected,
            lambda folder: (
                engine_checkpoint_error(folder)
                if folder == newest
                else trainer_folder_error(folder)
            ),
        ),
        ASIDE,
    )


def leave_signals_to_engine(
    original: Original, self: JITCheckpointCallback, trainer: Trainer
) -> None:
    """Wraps ``JITCheckpointCallback.set_trainer``: under ZeRO the stock callback does nothing, and
    ``stop_callback.py`` saves in its place.
    """
    if under_zero(trainer):
        self.trainer = trainer  # without a manager the stock events do nothing
    else:
        original(self, trainer)
