"""Completeness checks of the folders that the Trainer, Accelerate and Lightning write around a
checkpoint of an engine.

The engine's checkpoint is committed atomically. The other files are written before or after it,
without a final rename and without a flush: a killed job, or a power failure, leaves folders that
look finished.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint import find
from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.find import integrity_error
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger, parse_json

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE = "trainer_state.json"
TRAINER_PREFIX = "checkpoint-"  # of the folders of a Trainer
MODEL_TAG = "pytorch_model"  # Accelerate's tag of the first model
SENTINEL = "checkpoint-is-incomplete.txt"
RESTORE = "restore it, or go on from another checkpoint"
ACCELERATE_ARCHIVES = (  # a script may save its own files beside them, in any format
    "scheduler*.bin",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
)
ACCELERATE_STATE = (
    "is a state that accelerator.save_state wrote, not a checkpoint of the Trainer; load it with "
    "accelerator.load_state, or run hf-zero convert-checkpoint {folder} MODEL and give the Trainer "
    "the weights with from_pretrained('MODEL')"
)
OTHER_TRAINER = (
    "is a checkpoint of a Trainer {without}, whose optimizer's state a Trainer under ZeRO cannot "
    "read; start a new run from its weights{convert} with from_pretrained, or continue it without "
    "ZeRO"
)
MODEL_ALONE = (
    "holds the model alone, as save_only_model=True writes it, and nothing that training resumes "
    "from; start a new run from its weights with from_pretrained, and leave save_only_model out of "
    "a run that is to be resumed"
)


def has_engine_checkpoint(folder: Path) -> bool:
    """Return whether an engine has begun to save into ``folder``."""
    return (folder / find.LATEST).is_file() or any(
        item.name.startswith(find.RESERVED) or find.is_checkpoint(item) for item in folder.iterdir()
    )


def is_accelerate_state(folder: Path) -> bool:
    """Return whether ``Accelerator.save_state`` wrote ``folder``, not the Trainer."""
    of_accelerate = (folder / MODEL_TAG).is_dir() or any(folder.glob("random_states_*.pkl"))
    return of_accelerate and not (folder / STATE).exists()


def written_otherwise(folder: Path) -> str:
    """Return the reason why ``folder``, which a Trainer under ZeRO did not write, cannot be resumed
    from by one; "" for a folder of such a Trainer, complete or not.
    """
    if is_accelerate_state(folder):
        return f"{folder} {ACCELERATE_STATE.format(folder=folder)}"
    if not (folder / STATE).is_file() or has_engine_checkpoint(folder):
        return ""
    without, convert = "without ZeRO", ""
    if any(folder.glob("pytorch_model_fsdp*")):
        without = "under FSDP"
        convert = f", which hf-zero convert-checkpoint {folder} MODEL writes,"
    elif not (folder / "optimizer.pt").is_file():
        model = next(folder.glob("*model*.safetensors*"), None)  # also adapters
        return "" if model is None else f"{folder} {MODEL_ALONE}"
    return f"{folder} {OTHER_TRAINER.format(without=without, convert=convert)}"


def engine_checkpoint_error(folder: Path, tag: str | None = None) -> str:
    """Return the reason why the engine's checkpoint in ``folder`` cannot be resumed from, or ""."""
    try:
        checkpoint = find.locate(folder, tag)
    except CheckpointError as error:
        return str(error)
    if checkpoint != folder:
        return integrity_error(checkpoint)
    return f"{folder} has whole weights and nothing that training resumes from; {RESTORE}"


def trainer_folder_error(folder: Path) -> str:
    """Return why a Trainer under ZeRO cannot resume from ``folder``, a ``checkpoint-N``, or ""."""
    otherwise = written_otherwise(folder)
    if otherwise:
        return otherwise
    if (folder / SENTINEL).exists():
        return (
            f"{folder / SENTINEL} says that its save has not ended; remove that file "
            "to use it all the same"
        )
    return (
        _readable_json(folder / STATE, "global_step")
        or engine_checkpoint_error(folder)
        or damaged_archive(folder, "scheduler.pt", "rng_state*.pth")
    )


@dataclass(frozen=True)
class StateContents:
    """The contents of a folder of ``Accelerator.save_state``: a checkpoint per engine, files."""

    tags: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def of(cls, accelerator: Accelerator) -> StateContents:
        """Return the contents that ``accelerator`` would save for the objects prepared so far."""
        stepped = [
            s for s in accelerator._schedulers if type(s).__name__ != "DeepSpeedSchedulerWrapper"
        ]
        return cls(
            tuple(_numbered(MODEL_TAG, index) for index in range(len(accelerator._models))),
            tuple(_numbered("scheduler", index) + ".bin" for index in range(len(stepped)))
            + tuple(
                f"custom_checkpoint_{index}.pkl"
                for index in range(len(accelerator._custom_objects))
            ),
        )

    def error(self, folder: Path) -> str:
        """Return the reason why ``folder`` cannot be loaded, or ""."""
        for tag in self.tags:
            problem = engine_checkpoint_error(folder, tag)
            if problem:
                return problem
        for name in (
            *(f"random_states_{rank}.pkl" for rank in range(ranks_of(folder / MODEL_TAG))),
            *self.files,
        ):
            if not (folder / name).exists():
                return f"{folder / name} is missing; {RESTORE}"
        return damaged_archive(folder, *ACCELERATE_ARCHIVES)


def ranks_of(checkpoint: Path) -> int:
    """Return the number of ranks that wrote ``checkpoint``, a tag's folder."""
    path = checkpoint / MANIFEST_NAME
    return len(read_manifest(path).files) if path.is_file() else 0


def warn_lost_random_states(
    folder: Path, checkpoint: Path, name: str, rank: int, ranks: int
) -> None:
    """Log a warning if random states do not carry over from ``folder``, which was saved with the
    engine's ``checkpoint``. ``name`` is this rank's file of random states.
    """
    saved = ranks_of(checkpoint)
    if saved and saved != ranks:
        if rank == 0:
            text = (
                "%s was saved by %d rank(s), this run has %d: random states of ranks that are "
                "gone or new do not carry over (dropout, data augmentation)"
            )
            logger.warning(text, folder, saved, ranks)
    elif not (folder / name).exists():
        logger.warning(
            "%s has no %s: the random numbers of this rank do not go on from there "
            "(dropout, data augmentation)",
            folder,
            name,
        )


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _readable_json(path: Path, key: str) -> str:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and key in content:
            return ""
        return f"{path} has no {key!r}; {RESTORE}"
    except OSError as error:
        return f"{path} is missing or unreadable ({error.strerror}); {RESTORE}"
    except ValueError as error:
        return f"{path} is cut short or damaged ({error}); {RESTORE}"


def damaged_archive(folder: Path, *patterns: str) -> str:
    """Return a message on the first file of ``patterns`` that torch.save has not completed, or "":
    it writes the directory of the zip archive last.
    """
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if not zipfile.is_zipfile(path):
            return f"{path} is cut short or damaged; {RESTORE}"
    return ""


def last_complete(newest_first: Iterable[Path], wrong: Callable[[Path], str]) -> Path | None:
    """Return the first folder for which ``wrong`` returns "", with a warning for each folder before
    it; None if there is no folder.

    Raises CheckpointError if there are folders and none is complete.
    """
    incomplete = []
    for folder in newest_first:
        problem = wrong(folder)
        if not problem:
            return folder
        incomplete.append(f"{folder.name}: {problem}")
        logger.warning("%s is not complete and is skipped: %s", folder, problem)
    if incomplete:
        raise CheckpointError(
            f"none of the {len(incomplete)} checkpoint(s) is complete "
            f"({'; '.join(incomplete)}); restore one, or start from scratch without resuming"
        )
    return None


def on_disk_or_damage(
    look: Callable[[], Path | None],
) -> tuple[Path | None, CheckpointError | None]:
    """Return the checkpoint for which rank 0 looks by ``look``, or None and its error, to be raised
    if the memory of the hosts has none either. Collective.
    """
    try:
        return decide_on_rank_0(get_world_group(), look), None
    except CheckpointError as error:
        return None, error


def numbered_folders(parent: Path, name: str, suffix: str = "") -> list[Path]:
    """Return the folders ``<name><number><suffix>`` in ``parent``, highest number first."""
    if not parent.is_dir():
        return []
    checkpoints = [
        (int(match[1]), item)
        for item in parent.iterdir()
        if (match := re.fullmatch(rf"{re.escape(name)}(\d+){re.escape(suffix)}", item.name))
    ]
    return [item for _, item in sorted(checkpoints, reverse=True) if item.is_dir()]
