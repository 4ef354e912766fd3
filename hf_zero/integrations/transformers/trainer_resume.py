"""The checkpoint that a Trainer under ZeRO resumes from: the last complete one in ``output_dir`` or
in the memory of the hosts, or the one that a script names.

Imported while ``import transformers`` runs: everything of it is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint import find
from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.memory import newest_in_memory
from hf_zero.config import ZeroConfig
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError
from hf_zero.integrations.checkpoint_folders import (
    STATE,
    TRAINER_PREFIX,
    has_engine_checkpoint,
    last_complete,
    numbered_folders,
    on_disk_or_damage,
    trainer_folder_error,
    warn_lost_random_states,
    written_otherwise,
)
from hf_zero.integrations.transformers.trainer_batches import adopt_accumulation
from hf_zero.integrations.transformers.trainer_phases import windows_of
from hf_zero.integrations.transformers.trainer_route import output_folder
from hf_zero.logging import listed, log_rank0

if TYPE_CHECKING:
    from transformers import Trainer

TRUTHS = {"True": True, "true": True, "False": False, "false": False}
MARKS = "_hf_zero_marks"  # attribute of a Trainer: references, which nobody reads


def prepare_resume(trainer: Trainer, resume: str | bool | None) -> str | bool | None:
    """Return what ``Trainer.train(resume_from_checkpoint=resume)`` resumes from: for True (also as
    text), and for the last checkpoint of ``output_dir``, the newer of the last complete one and of
    that in the memory of the hosts; another folder itself. Collective.

    It warns of random states that do not carry over, sets the accumulation of this run
    (:func:`~.trainer_batches.adopt_accumulation`), and keeps a checkpoint in memory from removal
    until :func:`release_marks`.

    Raises CheckpointError for an incomplete folder, naming the last complete one, and if there
    are checkpoints and none is complete, in memory neither.
    """
    resume = _as_bool(resume, output_folder(trainer.args))
    if resume is None or resume is False:
        return resume
    folder = _last_checkpoint(trainer) if resume is True else _named_checkpoint(trainer, resume)
    if folder is None:
        return resume  # the Trainer raises that there is none
    checkpoint = decide_on_rank_0(
        get_world_group(),
        lambda: find.locate(folder) if folder.is_dir() and has_engine_checkpoint(folder) else None,
    )
    if checkpoint is not None:
        rank, ranks = trainer.args.process_index, trainer.args.world_size
        name = f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        warn_lost_random_states(folder, Path(str(checkpoint)), name, rank, ranks)
        if windows_of(trainer) is None:  # else training_phases say how many samples a step has
            adopt_accumulation(trainer, folder, checkpoint)
    return str(folder)


def release_marks(trainer: Trainer) -> None:
    """Drop the marks of the checkpoint in memory that ``trainer`` resumes from: its engine, which
    exists now, has marks of its own.
    """
    vars(trainer).pop(MARKS, None)


def _keep_marks(trainer: Trainer, marks: Sequence[object]) -> None:
    vars(trainer)[MARKS] = marks


def _as_bool(resume: str | bool | None, output: Path) -> str | bool | None:
    """Return ``resume`` or, for the text of a truth value that names no folder, that value, with a
    message.
    """
    if not isinstance(resume, str) or resume not in TRUTHS or Path(resume).exists():
        return resume
    truth = TRUTHS[resume]
    log_rank0(
        f"resume_from_checkpoint={resume!r} is text, as a command line gives it, and no "
        "such folder exists: "
        + (f"resuming from the last checkpoint in {output}" if truth else "not resuming")
    )
    return truth


def _last_checkpoint(trainer: Trainer) -> Path | None:
    """Return the newer of the last complete checkpoint in ``output_dir`` and of that in memory;
    None if there is no checkpoint. Collective.
    """
    output = output_folder(trainer.args)
    on_disk, damage = on_disk_or_damage(
        lambda: last_complete(numbered_folders(output, TRAINER_PREFIX), trainer_folder_error)
    )
    folder = _newer_in_memory(trainer, on_disk)
    if folder is None and damage is not None:
        raise damage
    return folder


def _named_checkpoint(trainer: Trainer, name: str) -> Path:
    """Return the folder ``name`` or, if it is the last one of the run, which scripts find by
    ``get_last_checkpoint``, a newer one in memory. Collective.
    """
    folder, output = Path(name), output_folder(trainer.args)

    def is_last() -> bool:
        _refuse_incomplete(folder, output)
        return _is_of_trainer(folder) and folder.resolve() in [
            checkpoint.resolve() for checkpoint in numbered_folders(output, TRAINER_PREFIX)[:1]
        ]

    if decide_on_rank_0(get_world_group(), is_last):
        return _newer_in_memory(trainer, folder) or folder
    return folder


def _newer_in_memory(trainer: Trainer, folder: Path | None) -> Path | None:
    """Return the folder of the newest checkpoint in memory, which it logs and keeps from removal;
    ``folder`` if that is newer. Collective.
    """
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    checkpoint = newest_in_memory(
        ZeroConfig.coerce(config, allow_auto=True, foreign=True),
        folder,
        run=output_folder(trainer.args),
    )
    if checkpoint is None:
        return folder
    log_rank0(f"resume from step {checkpoint.step} in the memory of the hosts")
    _keep_marks(trainer, checkpoint.marks)
    return Path(str(checkpoint.directory))


def _refuse_incomplete(folder: Path, output: Path) -> None:
    """Raise CheckpointError for a ``folder`` that is missing, and for one of a Trainer that it
    cannot resume from. ``output`` has the checkpoints of the run.
    """
    if not folder.exists():
        names = [checkpoint.name for checkpoint in numbered_folders(output, TRAINER_PREFIX)]
        raise CheckpointError(
            f"resume_from_checkpoint={str(folder)!r}: there is no such folder (looked for "
            f"{folder.resolve()}); {output} holds {listed(names) or 'no checkpoint'}: pass the "
            "path of one, or True for the last"
        )
    if not _is_of_trainer(folder):
        return  # the Trainer's own error is more specific
    if otherwise := written_otherwise(folder):
        raise CheckpointError(f"resume_from_checkpoint: {otherwise}")
    if problem := trainer_folder_error(folder):
        others = numbered_folders(folder.parent, TRAINER_PREFIX)
        complete = next((c for c in others if c != folder and not trainer_folder_error(c)), None)
        raise CheckpointError(
            f"{folder} is not complete: {problem}. "
            + (
                f"{complete} is complete"
                if complete
                else f"No other checkpoint in {folder.parent} is complete"
            )
        )


def _is_of_trainer(folder: Path) -> bool:
    """Return whether a Trainer wrote ``folder``, in part at least."""
    return folder.is_dir() and (has_engine_checkpoint(folder) or (folder / STATE).is_file())
