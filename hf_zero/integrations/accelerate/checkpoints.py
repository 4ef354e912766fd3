"""Wrappers of ``Accelerator.save_state`` and ``load_state``: only complete states are loaded and
counted by ``total_limit``, incomplete ones are named in warnings.

Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from hf_zero.checkpoint.background_saves import after_commit
from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.find import DROPPED
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.retention import excess, remove
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.accelerator import forget_window, make_unclaimed_step
from hf_zero.integrations.accelerate.figures import keep_measures_in
from hf_zero.integrations.accelerate.memory_saves import INTO_MEMORY, engines_of, newer_in_memory
from hf_zero.integrations.accelerate.schedules import keep_curves
from hf_zero.integrations.checkpoint_folders import (
    MODEL_TAG,
    STATE,
    StateContents,
    last_complete,
    numbered_folders,
    on_disk_or_damage,
    warn_lost_random_states,
)
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.save_redirection import load_folder, save_folder
from hf_zero.integrations.seams import Original, replaced
from hf_zero.logging import counted, log_rank0, logger

if TYPE_CHECKING:
    from accelerate import Accelerator

P = ParamSpec("P")

PREFIX = "checkpoint_"


def _under_zero(accelerator: Accelerator) -> bool:
    return finder.chosen() and accelerator.distributed_type == "DEEPSPEED"


def _names_itself(accelerator: Accelerator) -> bool:
    return (
        _under_zero(accelerator) and accelerator.project_configuration.automatic_checkpoint_naming
    )


def _states(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def _with_models_apart(
    wrapper: Callable[Concatenate[Original, Accelerator, P], object],
) -> Callable[Concatenate[Original, Accelerator, P], object]:
    """Have a state hold models without an engine, as of ``prepare_model(model,
    evaluation_mode=True)``, as objects that are registered for checkpointing.
    """

    @wraps(wrapper)
    def wrapped(original: Original, self: Accelerator, *args: P.args, **kwargs: P.kwargs) -> object:
        models = self._models if _under_zero(self) else []
        apart = [model for model in models if not is_engine(model)]
        if not apart:
            return wrapper(original, self, *args, **kwargs)
        engines, objects = [m for m in models if is_engine(m)], [*self._custom_objects, *apart]
        with replaced(self, _models=engines, _custom_objects=objects):
            return wrapper(original, self, *args, **kwargs)

    return wrapped


@_with_models_apart
def keep_until_saved(
    original: Original,
    self: Accelerator,
    output_dir: str | None = None,
    safe_serialization: bool = True,
    **save_model_func_kwargs: object,
) -> object:
    """Wraps ``Accelerator.save_state``: ``total_limit`` removes old states once the new one is
    complete, and the number of an incomplete state is not reused. A step that is still deferred is
    made before.
    """
    make_unclaimed_step(self)
    if output_dir is not None:
        output_dir = save_folder(output_dir)
    if not _names_itself(self):
        if _under_zero(self) and output_dir is not None and not hasattr(self, INTO_MEMORY):
            keep_measures_in(self, Path(output_dir).parent)
        return original(self, output_dir, safe_serialization, **save_model_func_kwargs)
    keep_measures_in(self, Path(self.project_dir))
    settings, parts = self.project_configuration, StateContents.of(self)
    settings.iteration = decide_on_rank_0(
        get_world_group(), lambda: _first_free_number(_states(self), settings.iteration, parts)
    )
    limit = settings.total_limit
    with replaced(settings, total_limit=None):
        location = original(self, output_dir, safe_serialization, **save_model_func_kwargs)
    if limit is not None:
        self.wait_for_everyone()
        if self.is_main_process:
            newest = Path(location)
            after_commit(newest, lambda: _keep(newest, max(limit, 1), parts))
        self.wait_for_everyone()
    return location


def _first_free_number(states: Path, number: int, parts: StateContents) -> int:
    """Return the first number, from ``number`` on, whose folder holds no incomplete state."""
    while (folder := states / f"{PREFIX}{number}").exists() and (problem := parts.error(folder)):
        number += 1
        text = "%s is not complete and is left as it is; the state is saved as %s%d (%s)"
        logger.warning(text, folder, PREFIX, number, problem)
    return number


def _refuse_trainer_folder(folder: Path) -> None:
    """Raise CheckpointError if the Trainer wrote ``folder``."""
    if (folder / STATE).is_file() and not (folder / MODEL_TAG).exists():
        raise CheckpointError(
            f"accelerator.load_state: {folder} is a checkpoint of the Trainer, not a state that "
            "accelerator.save_state wrote; resume it with "
            f"trainer.train(resume_from_checkpoint={str(folder)!r}), or run hf-zero "
            f"convert-checkpoint {folder} MODEL and load the weights with from_pretrained('MODEL')"
        )


def _next_number(states: Path, number: int) -> int:
    """Return the first number, from ``number`` on, after those of all states: training that goes on
    saves beside them, where Accelerate's own count begins with 0 in each process.
    """
    taken = (int(folder.name.removeprefix(PREFIX)) for folder in numbered_folders(states, PREFIX))
    return max([number, *(number_taken + 1 for number_taken in taken)])


def _refuse_none_saved(states: Path) -> None:
    """Raise CheckpointError if ``states``, the folder of a run's states, is missing or empty:
    Accelerate loads states of other names, too.
    """
    if not (states.is_dir() and any(states.iterdir())):
        raise CheckpointError(
            f"accelerator.load_state() found no state in {states}; in a first run leave the call "
            "out, or catch this hf_zero.errors.CheckpointError, which all ranks raise; or name the "
            "folder of another run as project_dir"
        )


def _keep(newest: Path, limit: int, parts: StateContents) -> None:
    parent = newest.parent
    for leftover in parent.parent.glob(f"{DROPPED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    older = [folder for folder in numbered_folders(parent, PREFIX) if folder != newest]
    chosen = excess([newest, *older], limit, {newest}, parts.error)
    remove(chosen, os.path.join(os.pardir, DROPPED))  # outside: folders in here count as states


def _last_state(accelerator: Accelerator) -> str | None:
    """Return the newest of the last complete state, where states have numbers, and of those in the
    memory of the hosts; None if Accelerate is to look itself. Collective. Raises CheckpointError if
    states have numbers, and there is none or none is complete.
    """
    if not _names_itself(accelerator):
        return newer_in_memory(accelerator, None) if _under_zero(accelerator) else None
    states, parts = _states(accelerator), StateContents.of(accelerator)
    checkpoint, damage = on_disk_or_damage(
        lambda: last_complete(numbered_folders(states, PREFIX), parts.error)
    )
    folder = newer_in_memory(accelerator, None if checkpoint is None else str(checkpoint))
    if folder is None and damage is not None:
        raise damage
    if folder is None:
        decide_on_rank_0(get_world_group(), lambda: _refuse_none_saved(states))
    return folder


@_with_models_apart
def resume_from_complete(
    original: Original,
    self: Accelerator,
    input_dir: str | None = None,
    load_kwargs: object = None,
    **load_model_func_kwargs: object,
) -> object:
    """Wraps ``Accelerator.load_state``: without a folder, loads the newest of the last complete
    state and of those in the memory of the hosts, and has the next save use a number of its own.
    Warns of skipped states, and of random states, places in the data and schedules that do not
    carry over. Raises CheckpointError for a checkpoint of the Trainer.
    """
    last, named = input_dir is None, _names_itself(self)
    input_dir = _last_state(self) if input_dir is None else load_folder(input_dir)
    if input_dir is not None and _under_zero(self):
        decide_on_rank_0(
            get_world_group(), lambda: _refuse_trainer_folder(Path(input_dir).expanduser())
        )
        if named:
            keep_measures_in(self, Path(self.project_dir))
        elif not last:
            keep_measures_in(self, Path(input_dir).parent)
    result = original(self, input_dir, load_kwargs, **load_model_func_kwargs)
    forget_window(self)
    if last and named:
        self.project_configuration.iteration = decide_on_rank_0(
            get_world_group(),
            lambda: _next_number(_states(self), self.project_configuration.iteration),
        )
    if input_dir is not None and _under_zero(self):
        # Accelerate's count of micro-batches in a window: unknown for new ranks, and the window
        # may have another length now.
        self.step = 0
        folder, rank = Path(input_dir).expanduser(), self.process_index
        warn_lost_random_states(
            folder, folder / MODEL_TAG, f"random_states_{rank}.pkl", rank, self.num_processes
        )
        _follow_ranks(self, folder)
    return result


def _follow_ranks(accelerator: Accelerator, folder: Path) -> None:
    """Bring schedules, loaded from ``folder``, to the number of data-parallel ranks of this run, if
    another number saved them. Warn then of those that cannot be, and of stateful loaders, whose
    place counts the batches of one rank.
    """
    from accelerate.data_loader import DataLoaderShard

    engines, path = engines_of(accelerator), folder / MODEL_TAG / MANIFEST_NAME
    if accelerator.split_batches or not (engines and path.is_file()):
        return
    manifest, ranks = read_manifest(path), accelerator.num_processes
    saved, batch, config = manifest.world["size"], manifest.batch, engines[0].config
    if batch:
        saved, ranks = batch["readers"], engines[0].data_ranks
    if saved == ranks:
        return
    is_known = bool(batch) and batch["samples"] >= saved and config.has_batch_size
    same = not is_known or batch["samples"] * ranks == (config.train_batch_size or 0) * saved
    keep_curves(accelerator, folder, saved, ranks, same)
    stateful = any(
        isinstance(loader, DataLoaderShard) and loader.use_stateful_dataloader
        for loader in accelerator._dataloaders
    )
    if stateful and any(folder.glob("dl_state_dict*.bin")):
        log_rank0(
            f"{folder} was saved by {counted(saved, 'data-parallel rank')}, this run has {ranks}: "
            "a stateful loader counts the batches of one rank, and one that was saved inside an "
            "epoch goes on at another place in the data. Leave use_stateful_dataloader out, and "
            "call accelerator.skip_first_batches(loader, batches) with the number of batches of "
            "one rank, in this run, that the epoch has trained on",
            logging.WARNING,
        )
