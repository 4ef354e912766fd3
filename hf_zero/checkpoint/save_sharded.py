"""Save in five steps: check, plan, stage, write, commit. Every rank writes its own file; rank 0
also writes the manifest and the other files, and commits once all are written (save_job.py).

A blocking save streams tensors into the file, in the call. A background save copies them into
staging memory first, all or a part of them, and a thread writes and commits.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import hf_zero
from hf_zero.checkpoint import find
from hf_zero.checkpoint.commit import CommitTarget, canonical_path, commit_target
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.file_writer import write_tensors
from hf_zero.checkpoint.manifest import (
    AXES,
    Chunk,
    Export,
    FlatEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    TensorStateEntry,
    class_name,
)
from hf_zero.checkpoint.model_entries import ModelEntries, unwrapped
from hf_zero.checkpoint.progress import progress_bar
from hf_zero.checkpoint.save_job import NOTHING_SAVED, ByCollectives, SaveJob, SharedFiles
from hf_zero.checkpoint.save_plan import (
    RankFile,
    RankReport,
    buffers_of_other_stages,
    model_buffers,
    plan_save,
)
from hf_zero.checkpoint.script_state import NonTensorState, non_tensor_state, objects_file
from hf_zero.checkpoint.staging import ReadyFile, deferred_states
from hf_zero.checkpoint.storage import AnyPath, as_path
from hf_zero.checkpoint.tensorfile import FileHashes
from hf_zero.config import ZeroConfig
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.errors import CheckpointError
from hf_zero.logging import in_units, logger
from hf_zero.optim.group_scalars import report_of, scalars_in
from hf_zero.zero.layout.walk import attribute_of, config_of, modules_of
from hf_zero.zero.layout.whole_names import WholeNames

if TYPE_CHECKING:
    from hf_zero.checkpoint.background_saves import BackgroundSaver
    from hf_zero.checkpoint.run_state import SavedEngine


class _Exchanged(Enum):
    """The progress of a background save on all ranks: after PLANS another rank may have started its
    thread, after MANIFEST each has.
    """

    NOTHING = "nothing"
    PLANS = "plans"
    MANIFEST = "manifest"


def save(
    engine: SavedEngine,
    directory: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, object] | None = None,
    *,
    exclude_frozen_parameters: bool = False,
    save_latest: bool = True,
    keep: int | None = None,
    saver: BackgroundSaver | None = None,
    ready_file: ReadyFile | None = None,
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
        keep: number of complete checkpoints to keep among those whose tags differ from this one in
            their numbers alone, this one included; older ones are removed after the commit. None
            keeps all.
        saver: save in the background: return once everything is copied to staging memory, or,
            with ``checkpoint.staging_bytes``, once the state is copied whose changes cannot wait
            (``staging.py``), and let a thread write it. If there is no memory for the copy, a
            warning says so and the save blocks. The caller has waited for the save before
            (``saver.wait``).
        ready_file: written in place of a copy of the state, where it equals that.

    Raises:
        CheckpointError: on all ranks, if anything failed on one, or if another running job of this
            host has written the checkpoint. Earlier checkpoints are then untouched. An error in the
            background is raised by ``saver.wait()``.
        RankMismatchError: on the other ranks, if a rank ends during the save; after the commit the
            message says that the checkpoint is complete.
    """
    started = time.perf_counter()
    engine.refuse_destroyed("save")
    engine.optimizer_step.complete_state()
    target = _agree_on_target(engine, directory, tag, keep, ready_file)
    rank_save = _RankSave(
        engine,
        target,
        client_state or {},
        exclude_frozen=exclude_frozen_parameters,
        save_latest=save_latest,
        saver=saver,
        ready_file=ready_file,
    )
    try:
        plan, shared, not_staged = rank_save.plan_on_all_ranks()
        job = SaveJob(
            target, rank_save.path, engine.global_rank, engine.mesh.dims.world, shared, keep
        )
        if saver is not None and not not_staged:
            saver.start(job, plan.file)
            return target.final
        # no thread depends on what was exchanged: this rank writes in the call
        rank_save.exchanged = _Exchanged.NOTHING
        if saver is not None:
            saver.discard()
        if not_staged and engine.global_rank == 0:
            logger.warning(
                "%s is written while training waits, because it cannot be copied to "
                "host memory first: %s",
                target.tag,
                not_staged[0],
            )
        failure, cause = job.run(partial(rank_save.write, plan), ByCollectives(engine.mesh.job))
    except BaseException as error:
        rank_save.abort(error)
        raise
    if failure:
        raise CheckpointError(failure) from cause
    if shared is not None:
        took = time.perf_counter() - started
        logger.info("saved %s: %s in %.2f s", target.final, in_units(shared.nbytes), took)
    return target.final


class _RankPlan(NamedTuple):
    """One rank's plan of a save. rank_file: of its file. not_staged: why its state could not be
    staged; "" if it was, or the save blocks. non_tensors, buffers: the parts that rank 0 adds.
    """

    rank_file: RankFile
    not_staged: str
    non_tensors: NonTensorState | None
    buffers: dict[str, torch.Tensor]


@dataclass(eq=False)
class _RankSave:
    """One rank's steps of :func:`save`, with its arguments."""

    engine: SavedEngine
    target: CommitTarget
    client_state: Mapping[str, object]
    exclude_frozen: bool
    save_latest: bool
    saver: BackgroundSaver | None
    ready_file: ReadyFile | None

    def __post_init__(self) -> None:
        self.rank, world = self.engine.global_rank, self.engine.mesh.dims.world
        self.path = self.target.path_of(self.target.file_name(find.rank_file(self.rank, world)))
        self.exchanged = _Exchanged.NOTHING
        # of this save, whether or not its thread starts
        self._number = 0 if self.saver is None else self.saver.number + 1

    def plan_on_all_ranks(self) -> tuple[RankFile, SharedFiles | None, list[str]]:
        """Return the plan of this rank's file, the files that rank 0 writes beside its own, and the
        ranks whose state could not be staged, with the reason. Collective.
        """
        job_ranks, nothing_saved = self.engine.mesh.job, NOTHING_SAVED.format(self.target.tag)
        names = WholeNames(self.engine.module)
        other_buffers = buffers_of_other_stages(self.engine, names, self.exclude_frozen)
        plan, planned = collective_try(
            job_ranks,
            partial(self.plan_and_stage, names, other_buffers),
            self.path,
            nothing_saved,
            lambda plan: (plan.rank_file.report, plan.not_staged),
        )
        self.exchanged = _Exchanged.PLANS
        reports = [report for report, _ in planned]
        not_staged = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(planned) if why]
        shared, _ = collective_try(
            job_ranks, partial(self.shared_files, plan, reports), self.path.parent, nothing_saved
        )
        self.exchanged = _Exchanged.MANIFEST
        return plan.rank_file, shared, not_staged

    def plan_and_stage(
        self, names: WholeNames, other_buffers: dict[str, torch.Tensor]
    ) -> _RankPlan:
        """Plan this rank's file, and copy its state to host memory for a background save. On rank 0
        first note the save and create the folder. ``other_buffers``: those that rank 0 lacks.
        """
        engine, target, non_tensors = self.engine, self.target, None
        buffers: dict[str, torch.Tensor] = {}
        if self.rank == 0:
            buffers = model_buffers(engine, self.exclude_frozen) | other_buffers
            # first: state that cannot be saved must raise before anything is written
            non_tensors = non_tensor_state(engine, self.client_state)
            target.refuse_others(engine.save_log.others())
            engine.save_log.note((target.save_id, canonical_path(target.final)))
            target.prepare()
        plan = plan_save(
            engine, self.path.name, target.save_id, self.exclude_frozen, names, buffers
        )
        not_staged = ""
        if self.saver is not None:
            image = None if self.ready_file is None else self.ready_file.image_of(plan)
            deferred = partial(deferred_states, engine, plan.report)
            not_staged = self.saver.copy_to_host(plan.file, plan.tensors, image, deferred)
        return _RankPlan(plan, not_staged, non_tensors, buffers)

    def shared_files(self, plan: _RankPlan, reports: Sequence[RankReport]) -> SharedFiles | None:
        """Return the files that rank 0 writes beside its own; None on the other ranks."""
        engine, target, non_tensors = self.engine, self.target, plan.non_tensors
        if non_tensors is None:
            return None
        head = manifest_head(engine, target.tag, target.save_id, non_tensors, plan.buffers)
        manifest = join_reports(head, reports)
        files = config_files(engine.module)
        objects = objects_file(non_tensors, target.file_name(find.OBJECTS_NAME))
        if objects is not None:
            manifest = replace(manifest, objects=objects[0])
            files[objects[0].name] = objects[1]
        above = {find.SCRIPT: Path(__file__).with_name(find.SCRIPT).read_bytes()}
        if self.save_latest:
            above[find.LATEST] = target.tag.encode()
        return SharedFiles(manifest, files, above)

    def write(self, plan: RankFile) -> FileHashes:
        """Write this rank's file, under a progress bar on rank 0."""
        shown = None if self.rank == 0 else False
        with progress_bar(shown, plan.file.size, f"saving {self.target.directory}") as tick:
            return write_tensors(self.path, plan.file, plan.tensors, tick)

    def abort(self, error: BaseException) -> None:
        """Abort the save after ``error``, by which time the ranks have ``exchanged`` something. A
        thread of this save that runs goes on: an interrupt came as the call returned.
        """
        if self.saver is not None and self.saver.runs(self._number):
            return
        if self.saver is not None:
            self.saver.discard()
            # Any other error has ended the save on this rank alone: others may have started theirs.
            alone = not isinstance(error, CheckpointError)
            if alone and self.exchanged is not _Exchanged.NOTHING:
                others_started = self.exchanged is _Exchanged.MANIFEST
                self.saver.report_not_started(self._number, self.target, error, others_started)
        if self.rank == 0:
            self.target.abort()


def _agree_on_target(
    engine: SavedEngine,
    directory: str | os.PathLike[str],
    tag: str | None,
    keep: int | None,
    ready_file: ReadyFile | None,
) -> CommitTarget:
    """Return the target of this save, with rank 0's save_id: that of its ``ready_file``, if there
    is one. Collective.

    Raises CheckpointError if the ranks pass different tags.
    """
    name = f"global_step{engine.counters.global_steps}" if tag is None else str(tag)

    def check() -> AnyPath:
        _check_keep(keep)
        find.check_tag(name)
        return as_path(directory)

    save_id = secrets.token_hex(16) if ready_file is None else ready_file.save_id
    root, answers = collective_try(
        engine.mesh.job, check, directory, share=lambda root: (name, save_id)
    )
    names = {name_of_rank for name_of_rank, _ in answers}
    if len(names) > 1:
        raise CheckpointError(
            f"the ranks want to save under different tags {sorted(names)}; pass the "
            "same tag on every rank"
        )
    return commit_target(root, name, save_id=answers[0][1])


def _check_keep(keep: int | None) -> None:
    """Raise CheckpointError unless ``keep`` is None or an integer of at least 1."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(
            f"keep={keep!r} is no number of checkpoints; pass 1 or more, or None to keep all"
        )


def config_files(module: torch.nn.Module) -> dict[str, bytes]:
    """Return the configuration files that make a converted folder loadable, by name; {} for a model
    without a configuration (duck-typed).
    """
    files, inner = {}, unwrapped(module)
    # the property of a wrapper returns what a module inside it has
    computed = hasattr(type(inner), "config")
    config: Any = config_of(inner) if computed else attribute_of(inner, "config")
    if hasattr(config, "to_json_string"):
        content = json.loads(config.to_json_string())
        # save_pretrained sets this field; it is empty if the model was built from a bare
        # configuration and never saved.
        content["architectures"] = content.get("architectures") or [type(inner).__name__]
        files["config.json"] = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    configs = (attribute_of(child, "generation_config") for child in modules_of(inner))
    declared: Any = (config for config in configs if config is not None)
    generation: Any = next(declared, None) if files else None
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def manifest_head(
    engine: SavedEngine,
    tag: str,
    save_id: str,
    extra: NonTensorState,
    buffers: Mapping[str, torch.Tensor],
) -> Manifest:
    """Return the part of the manifest that rank 0 knows, without what the ranks report and without
    ``objects``. It shares state with the engine.
    """
    if engine.measures.counts_samples and not engine.config.has_batch_size:
        engine.measures.finish(engine)  # which adds the samples of the last steps to the counters
    optimizer = None
    if engine.bound is not None:
        groups = (GroupEntry(dict(of), {}, ()) for of in engine.bound.settings.hyperparameters())
        optimizer = OptimizerEntry(class_name(engine.bound.optimizer), tuple(groups))
    return Manifest(
        save_id=save_id,
        tag=tag,
        attempt=engine.generations.attempt,
        world={
            "size": engine.mesh.dims.world,
            "shard": engine.mesh.shard.size,
            "replicate": engine.mesh.pp_stage_ranks // engine.mesh.shard.size,
            **parallel_sizes(engine.config, engine.mesh.dims),
        },
        stage=engine.stage,
        precision=engine.config.precision,
        files=(),
        flats=(),
        parameters={},
        buffers={name: (b.dtype, tuple(b.shape)) for name, b in buffers.items()},
        aliases={},
        excluded=(),
        export=Export(),
        optimizer=optimizer,
        scaler=engine.scaler.state_dict() if engine.config.precision == "fp16" else None,
        lr_scheduler=extra.lr_scheduler,
        counters=asdict(engine.window_start.counters(engine)),
        features=engine.feature_set.state_dict(),
        loader=engine.window_start.data_position(engine),
        batch=_batch_of(engine),
        client_state=extra.client_state,
        objects=None,
        software=_software(),
    )


def _batch_of(engine: SavedEngine) -> dict[str, int]:
    """Return the sizes of a step's batch as the configuration gives them, and the number of ranks
    that read it; {} if no batch size is configured.
    """
    config = engine.written_config
    if not config.has_batch_size:
        return {}
    return {
        "samples": config.train_batch_size or 1,
        "micro_batch": config.train_micro_batch_size_per_gpu or 1,
        "micro_batches": config.gradient_accumulation_steps or 1,
        "readers": engine.data_ranks,
    }


def parallel_sizes(config: ZeroConfig, dims: ParallelDims) -> dict[str, int]:
    """Return the sizes of :data:`AXES` that ``config`` or the groups of the job give."""
    written = {
        "tensor": config.tensor_parallel.size,
        "sequence": config.sequence_parallel_size,
        "expert": config.expert_parallel.size,
    }
    return {axis: max(getattr(dims, axis), written.get(axis, 1)) for axis in AXES}


def manifest_of_run(engine: SavedEngine) -> Manifest:
    """Return what rank 0 knows of the manifest of a save without a collective: the head, and the
    flat buffers, without chunks, unless ranks hold different parts of the model.
    """
    head = manifest_head(engine, "", "", NonTensorState({}, None, {}), {})
    sizes = parallel_sizes(engine.config, engine.mesh.dims)
    parallel = {axis for axis, size in sizes.items() if size > 1}
    flats = engine.flats if parallel <= {"sequence"} else ()
    entries = (FlatEntry(flat.key, flat.trainable, flat.dtype, flat.layout, ()) for flat in flats)
    return replace(head, flats=tuple(entries))


def _software() -> dict[str, str]:
    """Return the versions of hf-zero and torch, and that of Transformers if the script uses it."""
    transformers = sys.modules.get("transformers")
    known = {} if transformers is None else {"transformers": transformers.__version__}
    return {"hf_zero": hf_zero.__version__, "torch": torch.__version__, **known}


def join_reports(head: Manifest, reports: Sequence[RankReport]) -> Manifest:
    """Return the manifest of rank 0's ``head`` and the ``reports`` of all ranks, by rank. It is a
    copy: later changes of the engine do not reach it.
    """
    flats = []
    model = ModelEntries.joined([report.model for report in reports if report.model is not None])
    for flat in model.flats:
        layouts = {
            key: layout
            for report in reports
            for key, (of, layout) in report.layouts.items()
            if of == flat.key
        }
        for key, layout in sorted(layouts.items()) or [(flat.key, flat.layout)]:
            chunks = [
                Chunk(file, *report.chunks[key])
                for file, report in enumerate(reports)
                if key in report.chunks
            ]
            chunks.sort(key=lambda chunk: (chunk.start, chunk.file))  # empty ones share a start
            flats.append(replace(flat, key=key, layout=layout, chunks=tuple(chunks)))
    manifest = replace(
        head,
        files=tuple(report.file for report in reports),
        flats=tuple(flats),
        parameters=model.parameters,
        aliases=model.aliases,
        excluded=model.excluded,
        export=model.export,
        optimizer=head.optimizer and _optimizer(head.optimizer, flats, model.groups, reports),
    )
    return deepcopy(manifest)


def _optimizer(
    head: OptimizerEntry,
    flats: Sequence[FlatEntry],
    names: Sequence[tuple[str, ...]],
    reports: Sequence[RankReport],
) -> OptimizerEntry:
    holders = {  # by parameter, a rank with elements of it
        piece.name: reports[chunk.file]
        for flat in flats
        for chunk in (flat.chunks if flat.trainable else ())
        for piece in flat.layout.pieces(chunk.start, chunk.stop)
    }
    groups = []
    for index, group in enumerate(head.groups):
        own = [name for name in names[index] if name in holders]
        scalars, overrides = report_of(
            {name: scalars_in(holders[name].groups[index], name) for name in own}
        )
        groups.append(replace(group, scalars=scalars, parameters=names[index], overrides=overrides))
    tensor_states = {
        parameter: TensorStateEntry(file, shapes)
        for file, report in enumerate(reports)
        for parameter, shapes in report.tensor_states.items()
    }
    return replace(head, groups=tuple(groups), tensor_states=tensor_states)
