"""Folders and tags that scripts for DeepSpeed pass to saves and loads of checkpoints."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from hf_zero.checkpoint.convert.to_universal import LATEST_UNIVERSAL
from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.find import LATEST, find_checkpoint
from hf_zero.checkpoint.storage import as_path
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError, ConfigError, TargetMismatchError
from hf_zero.logging import log_rank0, logger

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


Target = tuple[str, str | None]


def agreed_target(engine: TrainingEngine, save_dir: str | os.PathLike[str], tag: object) -> Target:
    """Return rank 0's folder and tag (collective). If another rank's differ, warn according to
    ``checkpoint.tag_validation``; "ignore" does not warn.

    Raises TargetMismatchError on all ranks with "fail", and ConfigError without a folder.
    """
    if not save_dir:
        raise ConfigError(f"save_checkpoint needs a folder, not {save_dir!r}; pass save_dir")
    folder = os.fspath(save_dir) if isinstance(save_dir, (str, os.PathLike)) else as_path(save_dir)
    target: Target = str(folder), None if tag is None else str(tag)
    if engine.mesh.dims.world == 1:
        return target
    every: list[Target] = get_world_group().all_gather_object(target, "the target of a save")
    others = [(rank, target) for rank, target in enumerate(every) if target != every[0]]
    mode = str(_section(engine).get("tag_validation", "warn")).lower()
    if others and mode != "ignore":
        rank, other = others[0]
        text = (
            f"rank {rank} wants to save as {_shown(other)} and rank 0 as {_shown(every[0])}; "
            "pass the same folder and tag on every rank, such as one that rank 0 broadcasts"
        )
        if mode == "fail":
            raise TargetMismatchError(text)
        if engine.global_rank == 0:
            logger.warning("%s; all ranks save as rank 0 says", text)
    return every[0]


def _section(engine: TrainingEngine) -> dict[str, object]:
    """Return the written keys of the section ``checkpoint``."""
    section: dict[str, object] = engine.config.to_dict().get("checkpoint", {})
    return section


def _shown(target: Target) -> str:
    folder, tag = target
    return folder if tag is None else os.path.join(folder, tag)


def tag_of(engine: TrainingEngine, load_dir: str | os.PathLike[str], tag: object) -> str | None:
    """Return ``tag``; for None that in ``latest_universal``, under ``checkpoint.load_universal`` or
    where there is no ``latest``. Rank 0 looks (collective).
    """
    if tag is not None:
        return str(tag)
    named, latest = (as_path(load_dir) / name for name in (LATEST_UNIVERSAL, LATEST))

    def universal() -> str | None:
        chosen = _section(engine).get("load_universal") or not latest.is_file()
        return str(named.read_text()).strip() if chosen and named.is_file() else None

    return decide_on_rank_0(get_world_group(), universal)


def nothing_to_load(load_dir: str | os.PathLike[str], tag: object) -> bool:
    """Return whether ``load_dir`` has no ``latest`` and no checkpoint, so that a script without a
    tag starts from scratch; logs a warning. Rank 0 looks (collective).
    """
    if tag is not None:
        return False

    def reason() -> str:
        if not (as_path(load_dir) / LATEST).is_file():
            try:
                find_checkpoint(load_dir)
            except CheckpointError as error:
                return str(error)
        return ""

    # a pipeline's other stages have other meshes: all ranks of the job load or none
    why = decide_on_rank_0(get_world_group(), reason)
    if why:
        log_rank0(f"load_checkpoint loads nothing: {why}", logging.WARNING)
    return bool(why)
