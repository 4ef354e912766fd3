"""Saving: every rank writes its own file into a temporary folder, which then becomes the
checkpoint by a rename.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from hf_zero.checkpoint import find
from hf_zero.checkpoint.async_save import UNTOUCHED, AsyncSaver, SaveJob
from hf_zero.checkpoint.collective_try import collective_try
from hf_zero.checkpoint.commit import CommitTarget, commit_target
from hf_zero.checkpoint.contract import Engine
from hf_zero.checkpoint.file_writer import write_tensors
from hf_zero.checkpoint.plan import (
    ExtraState,
    RankReport,
    SharedFiles,
    announce,
    extra_state,
    plan_save,
    publish,
    shared_files,
)
from hf_zero.checkpoint.progress import progress_bar
from hf_zero.checkpoint.retention import check_keep
from hf_zero.checkpoint.storage import AnyPath, as_path
from hf_zero.errors import CheckpointError
from hf_zero.logs import logger


def save(
    engine: Engine,
    directory: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    exclude_frozen_parameters: bool = False,
    save_latest: bool = True,
    keep: int | None = None,
    behind: AsyncSaver | None = None,
) -> AnyPath:
    """Save ``engine`` as ``<directory>/<tag>`` and return that folder. Collective.

    Args:
        directory: a folder that all ranks see, made if it does not exist; or the URL of one in an
        object store (``s3://bucket/run``). tag: name of the checkpoint, the same on all ranks;
        ``global_step<N>`` by default. client_state: what to hand back at the load; rank 0's is
        saved (FORMAT.md section 5 says what it may hold). exclude_frozen_parameters: leave out
        parameters that are not trained. save_latest: whether ``latest`` is to name this tag. keep:
        how many whole checkpoints stay whose tags differ from this one by their numbers alone, this
        one included; older
            ones are removed once it is whole. None keeps all.
        behind: return once everything is copied to staging memory, and let a thread write it. Where
        that memory is not to
            be had, a warning says so and everything is written before this returns. A save that is
            still being written is waited for.

    Raises:
        CheckpointError: on all ranks, if anything failed on one. Nothing that was saved before is
        touched then. What
            fails behind the training is raised by ``behind.wait()``.
    """
    rank, mesh = engine.global_rank, engine.mesh
    if behind is not None:
        behind.wait("another save")
    name = f"global_step{engine.counters.global_steps}" if tag is None else str(tag)
    untouched = UNTOUCHED.format(name)

    roots: list[AnyPath] = []

    def check() -> tuple[str, str]:
        check_keep(keep)
        find.check_tag(name)
        roots.append(as_path(directory))
        return name, secrets.token_hex(16)

    told = collective_try(mesh, check, directory)
    names = {each for each, _ in told}
    if len(names) > 1:
        raise CheckpointError(
            f"the ranks want to save under different tags {sorted(names)}; pass the "
            "same tag on every rank"
        )
    to = commit_target(roots[0], name, save_id=told[0][1])
    path = to.file(to.named(find.rank_file(rank, engine.world_size)))
    extra: list[ExtraState] = []
    rests: list[SharedFiles] = []

    def begin() -> None:
        if rank == 0:
            # first: what cannot be saved is found out before anything is written
            extra.append(extra_state(engine, client_state or {}))
            to.begin()

    def complete(written: list[RankReport]) -> None:
        if rank == 0:
            rests.append(
                shared_files(engine, to, written, extra[0], exclude_frozen_parameters, save_latest)
            )

    try:
        collective_try(mesh, begin, path.parent, untouched)
        if behind is not None:
            staged = collective_try(
                mesh,
                lambda: behind.stage(
                    plan_save(engine, path.name, to.save_id, exclude_frozen_parameters)
                ),
                path,
                untouched,
            )
            copied = [each for each in staged if isinstance(each, RankReport)]
            if len(copied) == len(staged):
                collective_try(mesh, lambda: complete(copied), path.parent, untouched)
                behind.start(SaveJob(to, path, rests[0] if rests else None, keep))
                return to.final
            why = next(
                f"rank {index}: {each}"
                for index, each in enumerate(staged)
                if not isinstance(each, RankReport)
            )
            if rank == 0:
                logger.warning(
                    "%s is written while training waits, because it cannot be copied to "
                    "host memory first: %s",
                    name,
                    why,
                )
        written = collective_try(
            mesh, lambda: _write_rank(engine, to, path, exclude_frozen_parameters), path, untouched
        )

        def finish() -> None:
            complete(written)
            if rests:
                publish(to, rests[0], [report.file.hash for report in written])

        collective_try(mesh, finish, path.parent, untouched)
    except BaseException:
        if rank == 0:
            to.abandon()
        raise
    whole = f"{to.final} itself is whole; pass its tag to load it."
    collective_try(mesh, lambda: announce(to, rests[0], keep) if rests else None, to.final, whole)
    return to.final


def _write_rank(
    engine: Engine, to: CommitTarget, path: AnyPath, exclude_frozen: bool
) -> RankReport:
    """Write this rank's file; rank 0 shows how far it is with its own."""
    mine = plan_save(engine, path.name, to.save_id, exclude_frozen)
    with progress_bar(
        None if engine.global_rank == 0 else False, mine.plan.size, f"saving {to.directory}"
    ) as tick:
        return mine.hashed(
            write_tensors(
                path, mine.plan, {name: each.values for name, each in mine.tensors.items()}, tick
            )
        )
