"""Plan and execution of a save: the file of this rank, the manifest and the other files of rank 0,
and the job that writes them, exchanges outcomes among the ranks and commits.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

import hf_zero
from hf_zero.checkpoint import engine_state, find, objects
from hf_zero.checkpoint.collective_try import describe_error, describe_failures
from hf_zero.checkpoint.commit import CommitTarget, retain
from hf_zero.checkpoint.described import Described
from hf_zero.checkpoint.hashes import FileHashes, hash_of
from hf_zero.checkpoint.manifest import FORMAT, Manifest
from hf_zero.checkpoint.records import (
    BUFFER,
    Chunk,
    FactorEntry,
    FileEntry,
    GroupEntry,
    OptimizerEntry,
    factor_key,
)
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FilePlan, plan_file
from hf_zero.zero.layout.cut_parameters import WholeNames
from hf_zero.zero.layout.flat_layout import FlatLayout

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


@dataclass(frozen=True)
class RankReport:
    """Report of one rank to rank 0.

    file: its rank file. chunks: by flat, (start, stop, tensor names). scalars, apart: numbers of
    each optimizer group, and of single parameters in it. factors: state of whole parameters in its
    file. layouts: for flats that tensor or expert parallelism cuts, key in the checkpoint -> (key,
    layout). model: set by the first rank of each pipeline stage.
    """

    file: FileEntry
    chunks: dict[str, tuple[int, int, tuple[str, ...]]]
    scalars: list[dict[str, Any]]
    apart: list[dict[str, Any]]
    factors: dict[str, dict[str, tuple[int, ...]]]  # shapes, by parameter and name
    layouts: dict[str, tuple[str, FlatLayout]]
    model: Described | None


@dataclass(frozen=True)
class SavePlan:
    """Plan of this rank's file: the place of each tensor, and a function that fetches it."""

    file: FilePlan
    tensors: dict[str, engine_state.DeferredTensor]
    report: RankReport


@dataclass(frozen=True)
class ExtraState:
    """State other than tensors, in the manifest's form, and its part for ``objects.pt``."""

    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    objects: dict[str, dict[str, Any]]


def plan_save(
    engine: TrainingEngine,
    name: str,
    save_id: str,
    exclude_frozen: bool,
    buffers: Mapping[str, torch.Tensor],
) -> SavePlan:
    """Return the plan of this rank's file ``name``. ``buffers`` go into the file of rank 0."""
    tensors: dict[str, engine_state.DeferredTensor] = {}
    chunks: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    layouts: dict[str, tuple[str, FlatLayout]] = {}
    names = WholeNames(engine.module)
    for flat in engine.flats:
        if not flat.writes or (exclude_frozen and not flat.trainable):
            continue
        if not engine_state.is_of_this_stage(flat):
            continue
        held = engine_state.flat_tensors(flat, engine.bound)
        key = engine_state.saved_key(flat)
        tensors |= {f"{key}::{name}": each for name, each in held.items()}
        chunks[key] = (*flat.owned, tuple(held))
        if key != engine_state.stage_key(flat):
            layout = engine_state.saved_layout(flat, names)
            layouts[key] = engine_state.stage_key(flat), layout
    if engine.global_rank == 0:
        tensors |= {
            BUFFER + name: engine_state.DeferredTensor.here(buffer)
            for name, buffer in buffers.items()
        }
    tensors |= {
        name: engine_state.DeferredTensor.here(state)
        for name, state in engine_state.rng_states().items()
    }
    factors = engine_state.factors_of(engine)
    tensors |= {
        factor_key(parameter, name): engine_state.DeferredTensor.here(each.reshape(-1))
        for parameter, of in factors.items()
        for name, each in of.items()
    }
    metadata = {"format": FORMAT, "save_id": save_id, "rank": str(engine.global_rank)}
    plan = plan_file(
        [(name, each.dtype, [each.numel]) for name, each in tensors.items()],
        metadata,
        DATA_ALIGNMENT,
    )
    file = FileEntry(name, engine.global_rank, plan.size, "")
    return SavePlan(
        plan,
        tensors,
        RankReport(
            file,
            chunks,
            engine_state.scalars_of(engine),
            engine_state.apart_of(engine),
            {
                parameter: {name: tuple(each.shape) for name, each in of.items()}
                for parameter, of in factors.items()
            },
            layouts,
            Described.of(engine, exclude_frozen) if engine.mesh.whole.is_first else None,
        ),
    )


def extra_state(engine: TrainingEngine, client_state: Mapping[str, Any]) -> ExtraState:
    """Return the current state other than tensors. Raises CheckpointError if it cannot be saved."""
    client, objects_of_client = objects.split("client_state", client_state)
    scheduler: dict[str, Any] | None = None
    objects_of_scheduler: dict[str, Any] = {}
    if hasattr(engine.lr_scheduler, "state_dict"):
        state, objects_of_scheduler = objects.split(
            "the state of the lr scheduler", engine.lr_scheduler.state_dict()
        )
        scheduler = {"class": engine_state.class_name(engine.lr_scheduler), "state": state}
    return ExtraState(
        client, scheduler, {"client_state": objects_of_client, "lr_scheduler": objects_of_scheduler}
    )


def build_manifest(
    engine: TrainingEngine,
    tag: str,
    save_id: str,
    reports: list[RankReport],
    extra: ExtraState,
    buffers: Mapping[str, torch.Tensor],
) -> Manifest:
    """Return the manifest, without its ``objects``. It is a copy: later changes of the engine do
    not reach it.
    """
    flats = []
    model = Described.joined([report.model for report in reports if report.model is not None])
    for flat in model.flats:
        layouts = {
            key: layout
            for report in reports
            for key, (of, layout) in report.layouts.items()
            if of == flat.key
        }
        for key, layout in sorted(layouts.items()) or [(flat.key, flat.layout)]:
            chunks = _chunks(key, reports)
            flats.append(replace(flat, key=key, layout=layout, chunks=chunks))
    manifest = Manifest(
        save_id=save_id,
        tag=tag,
        world={
            "size": engine.mesh.dims.world,
            "shard": engine.shard_world,
            "replicate": engine.world_size // engine.shard_world,
        },
        stage=engine.stage,
        precision=engine.config.precision,
        files=tuple(report.file for report in reports),
        flats=tuple(flats),
        parameters=model.parameters,
        buffers={name: (b.dtype, tuple(b.shape)) for name, b in buffers.items()},
        aliases=model.aliases,
        excluded=model.excluded,
        export=model.export,
        optimizer=_optimizer(engine, model.groups, reports),
        scaler=engine.scaler.state_dict() if engine.config.precision == "fp16" else None,
        lr_scheduler=extra.lr_scheduler,
        counters=asdict(engine.counters),
        techniques=engine.techniques.state_dict(),
        client_state=extra.client_state,
        objects=None,
        software={"hf_zero": hf_zero.__version__, "torch": torch.__version__},
    )
    return deepcopy(manifest)


def _chunks(key: str, reports: list[RankReport]) -> tuple[Chunk, ...]:
    """Return the chunks of the flat ``key``, in order."""
    held = sorted(
        (report.chunks[key][0], file, report.chunks[key])
        for file, report in enumerate(reports)
        if key in report.chunks
    )
    return tuple(Chunk(file, start, stop, tensors) for _, file, (start, stop, tensors) in held)


def _optimizer(
    engine: TrainingEngine, names: Sequence[tuple[str, ...]], reports: list[RankReport]
) -> OptimizerEntry | None:
    if engine.bound is None:
        return None
    groups = []
    for index, hyperparameters in enumerate(engine.bound.hyperparameters()):
        # A rank on which a group is empty has no scalars for it. Scalars of other ranks are equal,
        # except on a rank that has seen a parameter left unused: it reports each parameter apart.
        # Parameters that no rank has seen unused have made every step, as the group has.
        even = [
            report.scalars[index]
            for report in reports
            if report.scalars[index] and not report.apart[index]
        ]
        own = {name: numbers for report in reports for name, numbers in report.apart[index].items()}
        scalars = (
            even[0]
            if even
            else max(own.values(), key=lambda numbers: numbers.get("step", 0.0), default={})
        )
        apart = {name: numbers for name, numbers in own.items() if numbers != scalars}
        groups.append(GroupEntry(dict(hyperparameters), scalars, names[index], apart))
    factors = {
        parameter: FactorEntry(file, shapes)
        for file, report in enumerate(reports)
        for parameter, shapes in report.factors.items()
    }
    return OptimizerEntry(engine_state.class_name(engine.bound.optimizer), tuple(groups), factors)


SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True)
class SharedFiles:
    """The files other than rank files, as bytes: ``files`` in the checkpoint folder, ``above`` in
    its parent.

    The manifest still lacks the hashes of the rank files.
    """

    manifest: Manifest
    files: dict[str, bytes]
    above: dict[str, bytes]


def shared_files(
    engine: TrainingEngine,
    target: CommitTarget,
    reports: list[RankReport],
    extra: ExtraState,
    buffers: Mapping[str, torch.Tensor],
    save_latest: bool,
) -> SharedFiles:
    """Return the files that rank 0 writes beside its own rank file."""
    manifest = build_manifest(engine, target.tag, target.save_id, reports, extra, buffers)
    files = engine_state.config_files(engine.module)
    if any(extra.objects.values()):
        buffer = io.BytesIO()
        torch.save(extra.objects, buffer)
        name = target.file_name(find.OBJECTS_NAME)
        files[name] = content = buffer.getvalue()
        manifest = replace(manifest, objects=FileEntry(name, 0, len(content), hash_of(content)))
    above = {SCRIPT: Path(__file__).with_name(SCRIPT).read_bytes()}
    if save_latest:
        above[find.LATEST] = target.tag.encode()
    return SharedFiles(manifest, files, above)


NOTHING_SAVED = "Nothing was saved as {!r}; earlier checkpoints are as they were."


@dataclass(frozen=True)
class Outcome:
    """Result of writing the file of one rank: its hashes, or an error message."""

    hashes: FileHashes | None
    error: str = ""


class Exchange(Protocol):
    """Protocol by which the ranks of one save exchange their outcomes."""

    def gather(self, own: Outcome) -> list[Outcome]:
        """Return the outcomes of all ranks, by rank, on rank 0; the result on others is unused."""

    def broadcast(self, failure: str) -> str:
        """Return rank 0's ``failure`` on all ranks."""


@dataclass(frozen=True)
class SaveJob:
    """A planned save: its target, this rank's file and, on rank 0, all shared files."""

    target: CommitTarget
    path: AnyPath
    rank: int
    world: int
    shared: SharedFiles | None
    keep: int | None = None

    def run(
        self,
        write: Callable[[], FileHashes],
        exchange: Exchange,
        committed: Callable[[], object] = lambda: None,
    ) -> tuple[str, Exception | None]:
        """Write this rank's file with ``write``, which returns its hashes, and commit on rank 0,
        which calls ``committed`` last.

        Returns the failure, equal on all ranks and "" on success, and the exception of this rank,
        if any.
        """
        causes: list[Exception] = []
        failure = ""
        try:
            try:
                own = Outcome(write())
            except Exception as error:
                causes.append(error)
                own = Outcome(None, describe_error(error, self.path))
            outcomes = exchange.gather(own)
            if self.shared is not None:
                failure = self._publish(outcomes, causes)
        except BaseException:
            if self.shared is not None:
                self.target.abort()
            raise
        if self.shared is not None and failure:
            self.target.abort()
        elif self.shared is not None:
            failure = self._finish(committed, causes)
        return exchange.broadcast(failure), causes[0] if causes else None

    def _publish(self, outcomes: list[Outcome], causes: list[Exception]) -> str:
        """Write the shared files, with the hashes in the manifest, if all ranks have written their
        files. Returns "" once the checkpoint exists, else the failure; nothing has changed then.
        """
        assert self.shared is not None
        failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
        if not failed:
            entries = self.shared.manifest.files
            files = tuple(
                replace(entry, hash=outcome.hashes.whole, blocks=outcome.hashes.blocks)
                for entry, outcome in zip(entries, outcomes, strict=True)
                if outcome.hashes is not None
            )
            manifest = replace(self.shared.manifest, files=files)
            try:
                self.target.publish(manifest, self.shared.files, self.shared.above)
                return ""
            except Exception as error:
                causes.append(error)
                failed = {0: describe_error(error, self.path.parent)}
        return f"{describe_failures(failed, self.world)}. {NOTHING_SAVED.format(self.target.tag)}"

    def _finish(self, committed: Callable[[], object], causes: list[Exception]) -> str:
        """Point ``latest`` to the new checkpoint, then remove the one that it replaces and those
        beyond ``keep``. Returns the failure, or "".
        """
        assert self.shared is not None
        try:
            self.target.finish(self.shared.above)
            if self.keep is not None:
                retain(self.target.final, self.keep)
            committed()
        except Exception as error:
            causes.append(error)
            text = describe_failures({0: describe_error(error, self.target.final)}, self.world)
            return f"{text}. {self.target.final} itself is whole; pass its tag to load it."
        return ""
