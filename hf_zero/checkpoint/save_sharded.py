"""Save in five steps: check, plan, stage, write, commit. Every rank writes its own file; rank 0
commits once all files are written (plan.py).

A blocking save runs inline and streams tensors into the file. A background save copies them into
staging memory first, and a thread writes and commits (async_save.py).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.checkpoint import find
from hf_zero.checkpoint.collective_try import collective_try
from hf_zero.checkpoint.commit import CommitTarget, check_keep, commit_target
from hf_zero.checkpoint.engine_state import (
    buffers_of_other_stages,
    model_buffers,
    refuse_destroyed,
)
from hf_zero.checkpoint.file_writer import write_tensors
from hf_zero.checkpoint.hashes import FileHashes
from hf_zero.checkpoint.plan import (
    NOTHING_SAVED,
    Outcome,
    SaveJob,
    SavePlan,
    SharedFiles,
    extra_state,
    plan_save,
    shared_files,
)
from hf_zero.checkpoint.progress import progress_bar
from hf_zero.checkpoint.storage import AnyPath, as_path
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

if TYPE_CHECKING:
    from hf_zero.checkpoint.async_save import AsyncSaver
    from hf_zero.zero.training_engine import TrainingEngine


def save(
    engine: TrainingEngine,
    directory: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    exclude_frozen_parameters: bool = False,
    save_latest: bool = True,
    keep: int | None = None,
    background: AsyncSaver | None = None,
) -> AnyPath:
    """Save ``engine`` as ``<directory>/<tag>`` and return that folder. Collective.

    Args:
        directory: a folder that all ranks see, created if missing; or the URL of one in an object
            store (``s3://bucket/run``).
        tag: name of the checkpoint, equal on all ranks; ``global_step<N>`` by default.
        client_state: user state that the load returns; rank 0's is saved (FORMAT.md section 5 says
            what it may hold).
        exclude_frozen_parameters: leave out parameters that are not trained.
        save_latest: whether ``latest`` names this tag afterwards.
        keep: number of whole checkpoints to keep among those whose tags differ from this one in
            their numbers alone, this one included; older ones are removed after the commit. None
            keeps all.
        background: return once everything is copied to staging memory, and let a thread write it.
            If there is no memory for the copy, a warning says so and the save blocks. A save that
            is still being written is waited for.

    Raises:
        CheckpointError: on all ranks, if anything failed on one. Earlier checkpoints are then
            untouched. An error in the background is raised by ``background.wait()``.
    """
    refuse_destroyed(engine, "save")
    if background is not None:
        background.wait("another save")
    rank, job_ranks, world = engine.global_rank, engine.mesh.job, engine.mesh.dims.world
    engine.optimizer_step.complete_state()
    target = _agree_on_target(engine, directory, tag, keep)
    path = target.path_of(target.file_name(find.rank_file(rank, world)))
    nothing_saved = NOTHING_SAVED.format(target.tag)
    plans: list[SavePlan] = []
    shared: list[SharedFiles] = []
    elsewhere = buffers_of_other_stages(engine, exclude_frozen_parameters)
    buffers: dict[str, torch.Tensor] = {}

    def plan() -> tuple[Any, str]:
        if rank == 0:
            buffers.update(model_buffers(engine, exclude_frozen_parameters) | elsewhere)
            # first: state that cannot be saved must raise before anything is written
            extras.append(extra_state(engine, client_state or {}))
            target.begin()
        plans.append(
            plan_save(engine, path.name, target.save_id, exclude_frozen_parameters, buffers)
        )
        return plans[0].report, "" if background is None else background.stage(plans[0])

    def describe() -> None:
        if rank == 0:
            reports = [report for report, _ in planned]
            shared.append(shared_files(engine, target, reports, extras[0], buffers, save_latest))

    extras: list[Any] = []
    try:
        planned = collective_try(job_ranks, plan, path, nothing_saved)
        collective_try(job_ranks, describe, path.parent, nothing_saved)
    except BaseException:
        if rank == 0:
            target.abort()
        raise
    job = SaveJob(target, path, rank, world, shared[0] if shared else None, keep)
    not_staged = [f"rank {at}: {why}" for at, (_, why) in enumerate(planned) if why]
    if background is not None and not not_staged:
        background.start(job, plans[0].file)
        return target.final
    if not_staged and rank == 0:
        logger.warning(
            "%s is written while training waits, because it cannot be copied to "
            "host memory first: %s",
            target.tag,
            not_staged[0],
        )
    failure, cause = job.run(lambda: _stream(job, plans[0]), _ByCollectives(job_ranks))
    if failure:
        raise CheckpointError(failure) from cause
    return target.final


def _agree_on_target(
    engine: TrainingEngine, directory: str | os.PathLike[str], tag: str | None, keep: int | None
) -> CommitTarget:
    """Return the target of this save, with rank 0's save_id. Collective.

    Raises CheckpointError if the ranks pass different tags.
    """
    name = f"global_step{engine.counters.global_steps}" if tag is None else str(tag)
    roots: list[AnyPath] = []

    def check() -> tuple[str, str]:
        check_keep(keep)
        find.check_tag(name)
        roots.append(as_path(directory))
        return name, secrets.token_hex(16)

    answers = collective_try(engine.mesh.job, check, directory)
    names = {each for each, _ in answers}
    if len(names) > 1:
        raise CheckpointError(
            f"the ranks want to save under different tags {sorted(names)}; pass the "
            "same tag on every rank"
        )
    return commit_target(roots[0], name, save_id=answers[0][1])


def _stream(job: SaveJob, plan: SavePlan) -> FileHashes:
    """Write this rank's file from its tensors; return its hashes. Rank 0 shows progress."""
    with progress_bar(
        None if job.rank == 0 else False, plan.file.size, f"saving {job.target.directory}"
    ) as tick:
        tensors = {name: each.values for name, each in plan.tensors.items()}
        return write_tensors(job.path, plan.file, tensors, tick)


class _ByCollectives:
    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def gather(self, own: Outcome) -> list[Outcome]:
        outcomes: list[Outcome] = self._mesh.all_gather_object(own)
        return outcomes

    def broadcast(self, failure: str) -> str:
        return str(self._mesh.all_gather_object(failure)[0])
