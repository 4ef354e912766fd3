"""Where ``save_checkpoint`` and ``load_checkpoint`` of DeepSpeed's scripts go: ranks that name
different places, and folders that hold nothing yet.
"""

from __future__ import annotations

import os
from typing import Any

from hf_zero.checkpoint.find import LATEST, find_checkpoint
from hf_zero.checkpoint.storage import as_path
from hf_zero.deepspeed.universal_files import LATEST_UNIVERSAL
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError, ConfigError, TargetMismatchError
from hf_zero.logging import log_rank0, logger

Target = tuple[str, str | None]


def agreed_target(engine: Any, save_dir: str | os.PathLike[str], tag: Any) -> Target:
    """Rank 0's folder and tag (collective). Where another rank's are others it is warned of, as
    ``checkpoint.tag_validation`` says: "ignore" says nothing.

    Raises TargetMismatchError on all ranks with "fail", and ConfigError without a folder.
    """
    if not save_dir:
        raise ConfigError(f"save_checkpoint needs a folder, not {save_dir!r}; pass save_dir")
    given: Target = os.fspath(save_dir), None if tag is None else str(tag)
    if engine.world_size == 1:
        return given
    every: list[Target] = get_world_group().all_gather_object(given, "the target of a save")
    others = [(rank, each) for rank, each in enumerate(every) if each != every[0]]
    mode = str(engine.checkpoint_tag_validation_enabled()).lower()
    if others and mode != "ignore":
        rank, other = others[0]
        said = (
            f"rank {rank} wants to save as {_shown(other)} and rank 0 as {_shown(every[0])}; "
            "pass the same folder and tag on every rank, such as one that rank 0 broadcasts"
        )
        if mode == "fail":
            raise TargetMismatchError(said)
        if engine.global_rank == 0:
            logger.warning("%s; all ranks save as rank 0 says", said)
    return every[0]


def _shown(target: Target) -> str:
    folder, tag = target
    return folder if tag is None else os.path.join(folder, tag)


def tag_of(engine: Any, load_dir: str | os.PathLike[str], tag: Any) -> str | None:
    """``tag``; with ``checkpoint.load_universal`` and none, what ``latest_universal`` names."""
    named = as_path(load_dir) / LATEST_UNIVERSAL
    if tag is None and engine.load_universal_checkpoint() and named.is_file():
        return str(named.read_text()).strip()
    return None if tag is None else str(tag)


def nothing_to_load(engine: Any, load_dir: str | os.PathLike[str], tag: Any) -> bool:
    """Whether ``load_dir`` has no ``latest`` and no checkpoint is found in it, so that a script
    without a tag begins anew; warned of. Rank 0 looks (collective).
    """
    if tag is not None:
        return False
    why = ""
    if engine.global_rank == 0 and not (as_path(load_dir) / LATEST).is_file():
        try:
            find_checkpoint(load_dir)
        except CheckpointError as error:
            why = str(error)
    if engine.world_size > 1:
        why = get_world_group().broadcast_object(why, 0, "whether there is a checkpoint")
    if why:
        log_rank0(f"load_checkpoint loads nothing: {why}", 30)
    return bool(why)
