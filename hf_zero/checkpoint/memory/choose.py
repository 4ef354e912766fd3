"""Choice of the checkpoint to resume from: the newest generation that is complete over the memory
of the hosts, or the checkpoint on disk.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_zero.checkpoint import find
from hf_zero.checkpoint.failures import collective_try, decide_on_rank_0
from hf_zero.checkpoint.generations import Newest
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.memory import folders, saving
from hf_zero.checkpoint.memory.inventory import is_later
from hf_zero.checkpoint.memory.job_folders import JobFolders
from hf_zero.checkpoint.memory.load_preparation import LoadPreparation, warn_on_rank_0
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.checkpoint.storage import as_path, place_of
from hf_zero.config import ZeroConfig
from hf_zero.config.memory import MemorySection
from hf_zero.distributed import process_group
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, listed, log_rank0

if TYPE_CHECKING:
    from hf_zero.distributed.world_group import RankGroup


@dataclass(frozen=True)
class OnDisk:
    """A checkpoint on disk. step: -1 for one of another program. attempt: as in its manifest."""

    tag: str
    step: int
    attempt: int


def newest(
    engine: SavedEngine,
    directory: str | os.PathLike[str] | None,
    strict: bool = True,
    run: str | os.PathLike[str] | None = None,
) -> Newest | None:
    """Return the newest of the complete generations in memory and the checkpoint that ``directory``
    names as latest; None if there is neither. Collective.

    Hashes of the files to be read are compared, and files that this host lacks are fetched, before
    anything changes. A generation in memory that is damaged, of another model, or of a run in
    another folder than ``run``, is skipped and logged. ``strict`` as in
    :meth:`Engine.load_checkpoint`.
    """
    memory, ranks = saving.checkpoints_of(engine), engine.mesh.job
    damage: CheckpointError | None = None
    if memory is None:
        on_disk = _on_disk(ranks, engine.global_rank, directory)
    else:
        on_disk, damage = _on_disk_or_damage(ranks, engine.global_rank, directory)
        memory.wait()
        preparations = _generations(memory, ranks, on_disk, directory, run)
        prepared = (preparation.prepare(engine, strict) for preparation in preparations)
        checkpoint = next(filter(None, prepared), None)
        if checkpoint is not None:
            return checkpoint
    if damage is not None:
        raise damage
    if on_disk is None or directory is None:
        return None
    return Newest(as_path(directory), on_disk.tag, on_disk.step, in_memory=False)


def newest_in_memory(
    config: ZeroConfig,
    directory: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    run: str | os.PathLike[str] | None = None,
    skipped: Collection[str] = (),
) -> Newest | None:
    """Return the newest complete generation in memory, for the next engine of this process; None if
    there is none, or if ``<directory>/<tag>`` (by default the latest) is not older. Those of runs
    in another folder than ``run``, and the saves ``skipped``, are left out. Collective.

    Its folder has everything but the rank files, which ``engine.load_checkpoint(directory, tag)``
    adds. A copy of each file has been compared with its hash.
    """
    if not config.section_of(MemorySection).every:
        return None
    ranks, rank = get_world_group(), process_group.get_rank()
    on_disk, damage = _on_disk_or_damage(ranks, rank, directory, tag)
    where = saving.next_folders(config.section_of(MemorySection), ranks, rank)
    preparations = _generations(where, ranks, on_disk, directory, run)
    prepared = (each.prepare() for each in preparations if each.save_id not in skipped)
    checkpoint = next(filter(None, prepared), None)
    if checkpoint is None and damage is not None:
        raise damage
    return checkpoint


def choose_checkpoint(
    engine: SavedEngine,
    directory: str | os.PathLike[str],
    tag: str | None,
    strict: bool,
    resumes: bool,
) -> Newest:
    """Return the checkpoint that a load of ``directory`` means: with a ``tag`` that one; in the
    folder of a generation in memory that generation; else the :func:`newest`, unless an integration
    chooses it, the load leaves out the state of the optimizer (not ``resumes``), or the engine has
    made steps: it then goes back to the checkpoint in ``directory``. Collective.

    Raises CheckpointError if the generation of that folder is no longer complete.
    """
    memory, where = saving.checkpoints_of(engine), as_path(directory)
    assert memory is not None
    if where in [memory.folder(base) / folders.RESUME for base in memory.bases]:
        tag = find.latest_tag(where) if tag is None else tag
        save_id = read_manifest(where / tag / MANIFEST_NAME).save_id
        checkpoint = Newest(where, tag, -1, in_memory=True)
        if save_id == memory.ready:
            return checkpoint
        memory.wait()
        preparations = _generations(memory, engine.mesh.job)
        if not any(p.prepare(engine, strict) for p in preparations if p.save_id == save_id):
            raise CheckpointError(
                f"{where}: the generation in memory that was chosen cannot be loaded; start the "
                "job again: an older one, or a checkpoint on disk, is taken"
            )
        return checkpoint
    named = tag is not None or decide_on_rank_0(
        get_world_group(), lambda: find.is_one_checkpoint(where)
    )
    chooses = resumes and not (named or memory.saved_by_trainer or memory.has_stepped_on_all())
    chosen = newest(engine, directory, strict, directory) if chooses else None
    return chosen or Newest(directory, tag, -1, in_memory=False)


def _on_disk(
    ranks: RankGroup, rank: int, directory: str | os.PathLike[str] | None, tag: str | None = None
) -> OnDisk | None:
    """Return the checkpoint ``<directory>/<tag>``, by default the one that ``latest`` names; None
    without one. Collective.
    """

    def find_latest() -> OnDisk | None:
        if rank or directory is None:
            return None
        root = as_path(directory)
        if tag is None and not (root / find.LATEST).exists():
            return None
        folder, step, attempt = find.locate(root, tag), -1, 0
        if find.is_checkpoint(folder):
            manifest = read_manifest(folder / MANIFEST_NAME)
            step, attempt = manifest.counters.get("global_steps", -1), manifest.attempt
        return OnDisk(tag or find.latest_tag(root), step, attempt)

    _, found = collective_try(ranks, find_latest, directory, share=lambda value: value)
    on_disk: OnDisk | None = found[0]
    return on_disk


def _on_disk_or_damage(
    ranks: RankGroup, rank: int, directory: str | os.PathLike[str] | None, tag: str | None = None
) -> tuple[OnDisk | None, CheckpointError | None]:
    """Return :func:`_on_disk` and its error, which is logged: damage on disk must not bar a whole
    generation in memory. Collective.
    """
    try:
        return _on_disk(ranks, rank, directory, tag), None
    except CheckpointError as error:
        warn_on_rank_0(rank, f"{error}; looking in the memory of the hosts")
        return None, error


def _generations(
    where: JobFolders,
    ranks: RankGroup,
    on_disk: OnDisk | None = None,
    directory: str | os.PathLike[str] | None = None,
    run: str | os.PathLike[str] | None = None,
) -> Iterator[LoadPreparation]:
    """Yield the generations that were saved after the checkpoint ``on_disk`` in ``directory``,
    newest first, without those of runs in another folder than ``run``. Collective.
    """
    candidates, local = where.exchange_inventories(None if run is None else place_of(run))
    if on_disk is not None and not candidates:
        log_rank0(
            f"the memory of {counted(len(where.hosts.ranks), 'host')} "
            f"({listed(where.hosts.ranks)}) holds nothing of this run of job {where.job}: "
            f"{directory}/{on_disk.tag} is taken from the disk"
        )
    for generation in candidates:
        if on_disk is None or is_later(generation, on_disk.step, on_disk.attempt):
            yield LoadPreparation(where, ranks, generation, local)
