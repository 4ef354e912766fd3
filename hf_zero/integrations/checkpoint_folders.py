"""Folders that the Trainer, Accelerate and Lightning write around a checkpoint of ours, file by
file: which of them are whole.

Ours is whole or not there. What lies beside it is written before or after it, with no rename at the
end and no flush: a job that is killed, or a machine that loses its power, leaves folders that look
finished.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.checkpoint import find
from hf_zero.checkpoint.collective_try import describe_error
from hf_zero.checkpoint.find import integrity_error
from hf_zero.distributed import process_group, world_group
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger

STATE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"
RESTORE = "restore it, or go on from another checkpoint"


def of_an_engine(folder: Path) -> bool:
    """Whether an engine has begun to save into ``folder``."""
    return (folder / find.LATEST).is_file() or any(
        item.name.startswith(find.RESERVED) or find.is_checkpoint(item) for item in folder.iterdir()
    )


def engines_part(folder: Path, tag: str | None = None) -> str:
    """What is wrong with the checkpoint of an engine in ``folder``; "" if nothing is seen."""
    try:
        found = find.locate(folder, tag)
    except CheckpointError as error:
        return str(error)
    return (
        integrity_error(found)
        if found != folder
        else f"{folder} has whole weights and nothing that training resumes from; {RESTORE}"
    )


def trainers(folder: Path) -> str:
    """What is wrong with a ``checkpoint-N`` of a Trainer under ZeRO."""
    if (folder / SENTINEL).exists():
        return (
            f"{folder / SENTINEL} says that its save has not ended; remove that file "
            "to use it all the same"
        )
    return (
        _readable_json(folder / STATE, "global_step")
        or engines_part(folder)
        or archives(folder, "scheduler.pt", "rng_state*.pth")
    )


@dataclass(frozen=True)
class Parts:
    """What a folder of ``Accelerator.save_state`` consists of: a checkpoint for each engine, and
    files.
    """

    tags: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def of(cls, accelerator: Any) -> Parts:
        """As ``accelerator`` saves what it has prepared by now."""
        stepped = [
            each
            for each in accelerator._schedulers
            if type(each).__name__ != "DeepSpeedSchedulerWrapper"
        ]
        return cls(
            tuple(_numbered("pytorch_model", index) for index in range(len(accelerator._models))),
            tuple(_numbered("scheduler", index) + ".bin" for index in range(len(stepped)))
            + tuple(
                f"custom_checkpoint_{index}.pkl"
                for index in range(len(accelerator._custom_objects))
            ),
        )

    def trouble(self, folder: Path) -> str:
        """What is wrong with ``folder``; "" if nothing is seen."""
        for tag in self.tags:
            said = engines_part(folder, tag)
            if said:
                return said
        for name in (
            *(f"random_states_{rank}.pkl" for rank in range(ranks_of(folder / "pytorch_model"))),
            *self.files,
        ):
            if not (folder / name).exists():
                return f"{folder / name} is missing; {RESTORE}"
        return archives(folder, "*.bin", "*.pkl")


def ranks_of(checkpoint: Path) -> int:
    """How many ranks have written ``checkpoint``, a tag's folder."""
    return len(list(checkpoint.glob(find.RANK_PATTERN)))


def tell_lost_random_states(
    folder: Path, checkpoint: Path, name: str, rank: int, ranks: int
) -> None:
    """Say which random states do not carry over from ``folder``, saved with the engine's
    ``checkpoint``. This rank's would be ``name``.
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
        content = json.loads(path.read_text(encoding="utf-8"))
        return (
            ""
            if isinstance(content, dict) and key in content
            else f"{path} has no {key!r}; {RESTORE}"
        )
    except OSError as error:
        return f"{path} is missing or unreadable ({error.strerror}); {RESTORE}"
    except ValueError as error:
        return f"{path} is cut short or damaged ({error}); {RESTORE}"


def archives(folder: Path, *patterns: str) -> str:
    """The first file that torch.save has not written to its end; "" if there is none.

    Its directory stands at the end.
    """
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if not zipfile.is_zipfile(path):
            return f"{path} is cut short or damaged; {RESTORE}"
    return ""


def last_whole(newest_first: Iterable[Path], wrong: Callable[[Path], str]) -> Path | None:
    """The first in which nothing is wrong; those before it are named in warnings. None if there is
    no folder at all.

    Raises CheckpointError if there are some and none is whole.
    """
    torn = []
    for folder in newest_first:
        said = wrong(folder)
        if not said:
            return folder
        torn.append(f"{folder.name}: {said}")
        logger.warning("%s is not whole and is skipped: %s", folder, said)
    if torn:
        raise CheckpointError(
            f"none of the {len(torn)} checkpoint(s) is whole ({'; '.join(torn)}); restore one, or "
            "start anew without resuming"
        )
    return None


def decided(choose: Callable[[], Any]) -> Any:
    """What rank 0 says, on all ranks; where it fails, all raise CheckpointError. Collective."""
    answer: tuple[Any, str] = (None, "")
    if process_group.get_rank() == 0:
        try:
            answer = choose(), ""
        except (CheckpointError, OSError) as error:
            answer = None, describe_error(error)
    chosen, failure = world_group.get_world_group().broadcast_object(
        answer, what="which checkpoint is whole"
    )
    if failure:
        raise CheckpointError(failure)
    return chosen


def by_number(parent: Path, name: str, suffix: str = "") -> list[Path]:
    """Folders ``<name><number><suffix>`` in ``parent``, the highest number first."""
    if not parent.is_dir():
        return []
    found = [
        (int(match[1]), item)
        for item in parent.iterdir()
        if (match := re.fullmatch(rf"{re.escape(name)}(\d+){re.escape(suffix)}", item.name))
    ]
    return [item for _, item in sorted(found, reverse=True) if item.is_dir()]
