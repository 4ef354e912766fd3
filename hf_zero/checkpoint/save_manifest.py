"""The manifest of a save: the part that rank 0 knows, joined with the reports of all ranks; and
``objects.pt``, for values of the state beside it that JSON does not hold.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch

import hf_zero
from hf_zero.checkpoint.manifest import (
    Chunk,
    Export,
    FactorEntry,
    FileEntry,
    FlatEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
)
from hf_zero.checkpoint.save_plan import (
    ModelEntries,
    RankReport,
    batch_of,
    class_name,
    sizes_of_axes,
)
from hf_zero.checkpoint.tensorfile import hash_of
from hf_zero.errors import CheckpointError
from hf_zero.optim.segment_table import scalars_of_ranks

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

T = TypeVar("T")


@dataclass(frozen=True)
class NonTensorState:
    """State other than tensors, in the manifest's form, and its part for ``objects.pt``."""

    client_state: dict[str, object]
    lr_scheduler: dict[str, object] | None
    objects: dict[str, dict[str, object]]


def non_tensor_state(engine: TrainingEngine, client_state: Mapping[str, object]) -> NonTensorState:
    """Return the current state other than tensors. Raises CheckpointError if it cannot be saved."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"client_state={client_state!r:.80} is of type {type(client_state).__name__}; pass a "
            "dictionary"
        )
    client, objects_of_client = split("client_state", client_state)
    scheduler: dict[str, object] | None = None
    objects_of_scheduler: dict[str, object] = {}
    if hasattr(engine.lr_scheduler, "state_dict"):
        state, objects_of_scheduler = split(
            "the state of the lr scheduler", engine.lr_scheduler.state_dict()
        )
        scheduler = {"class": class_name(engine.lr_scheduler), "state": state}
    return NonTensorState(
        client, scheduler, {"client_state": objects_of_client, "lr_scheduler": objects_of_scheduler}
    )


def manifest_head(
    engine: TrainingEngine,
    tag: str,
    save_id: str,
    extra: NonTensorState,
    buffers: Mapping[str, torch.Tensor],
) -> Manifest:
    """Return the part of the manifest that rank 0 knows, without what the ranks report and without
    ``objects``. It shares state with the engine.
    """
    if engine.measures.counts_samples and not engine.config.has_batch_size:
        engine.measures.finish(engine)
    optimizer = None
    if engine.bound is not None:
        optimizer = OptimizerEntry(
            class_name(engine.bound.optimizer),
            tuple(
                GroupEntry(dict(hyperparameters), {}, ())
                for hyperparameters in engine.bound.hyperparameters()
            ),
        )
    return Manifest(
        save_id=save_id,
        tag=tag,
        begun=engine.generations.begun,
        world={
            "size": engine.mesh.dims.world,
            "shard": engine.mesh.shard.size,
            "replicate": engine.mesh.pp_stage_ranks // engine.mesh.shard.size,
            **sizes_of_axes(engine),
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
        techniques=engine.feature_set.state_dict(),
        loader=engine.window_start.data_position(engine),
        batch=batch_of(engine),
        client_state=extra.client_state,
        objects=None,
        software=_software(),
    )


def manifest_of_run(engine: TrainingEngine) -> Manifest:
    """Return what rank 0 knows of the manifest of a save without a collective: the head, and the
    flat buffers, without chunks, unless ranks hold different parts of the model.
    """
    head = manifest_head(engine, "", "", NonTensorState({}, None, {}), {})
    parallel = {axis for axis, size in sizes_of_axes(engine).items() if size > 1}
    flats = engine.flats if parallel <= {"sequence"} else ()
    entries = (FlatEntry(each.key, each.trainable, each.dtype, each.layout, ()) for each in flats)
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
            chunks = _chunks(key, reports)
            flats.append(replace(flat, key=key, layout=layout, chunks=chunks))
    manifest = replace(
        head,
        files=tuple(report.file for report in reports),
        flats=tuple(flats),
        parameters=model.parameters,
        aliases=model.aliases,
        excluded=model.excluded,
        export=model.export,
        optimizer=head.optimizer and _optimizer(head.optimizer, model.groups, reports),
    )
    return deepcopy(manifest)


def _chunks(key: str, reports: Sequence[RankReport]) -> tuple[Chunk, ...]:
    """Return the chunks of the flat ``key``, in order."""
    held = sorted(
        (report.chunks[key][0], file, report.chunks[key])
        for file, report in enumerate(reports)
        if key in report.chunks
    )
    return tuple(Chunk(file, start, stop, tensors) for _, file, (start, stop, tensors) in held)


def _optimizer(
    head: OptimizerEntry, names: Sequence[tuple[str, ...]], reports: Sequence[RankReport]
) -> OptimizerEntry:
    groups = []
    for index, group in enumerate(head.groups):
        scalars, overrides = scalars_of_ranks(
            [(report.scalars[index], report.overrides[index]) for report in reports]
        )
        groups.append(replace(group, scalars=scalars, parameters=names[index], overrides=overrides))
    factors = {
        parameter: FactorEntry(file, shapes)
        for file, report in enumerate(reports)
        for parameter, shapes in report.factors.items()
    }
    return replace(head, groups=tuple(groups), factors=factors)


def objects_file(extra: NonTensorState, name: str) -> tuple[FileEntry, bytes] | None:
    """Return entry and content of ``objects.pt``, called ``name``; None if all state is JSON."""
    if not any(extra.objects.values()):
        return None
    buffer = io.BytesIO()
    torch.save(extra.objects, buffer)
    content = buffer.getvalue()
    return FileEntry(name, 0, len(content), hash_of(content)), content


def is_json(value: object) -> bool:
    """Return whether ``json.loads(json.dumps(value))`` equals ``value``, with equal types (no
    tuples, no integer keys).
    """
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(is_json(item) for item in value)
    return type(value) is dict and all(
        type(key) is str and is_json(item) for key, item in value.items()
    )


def split(what: str, state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Divide ``state`` into its manifest form ``{"json", "objects"}`` and the values for
    ``objects.pt``.

    ``what`` names the state in errors. Raises CheckpointError for a value that neither form can
    hold.
    """
    plain, objects = {}, {}
    for key, value in state.items():
        if type(key) is not str:
            raise CheckpointError(
                f"{what} has the key {key!r} of type {type(key).__name__}; keys must be strings"
            )
        try:
            plain_value = is_json(value)
            json.dumps(value if plain_value else None)
        except (RecursionError, ValueError) as error:  # of cycles, depth, and digits of an integer
            raise CheckpointError(
                f"{what}[{key!r}] cannot be saved ({error}); store values that are not nested in "
                "themselves or thousands deep, and long integers as strings"
            ) from error
        if plain_value:
            plain[key] = value
        else:
            _check_loadable(f"{what}[{key!r}]", value)
            objects[key] = value
    return {"json": plain, "objects": sorted(objects)}, objects


def copy_as_saved(value: T) -> T:
    """Return a copy of ``value``, which a checkpoint can hold, as a load would return it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return cast(T, torch.load(buffer, map_location="cpu", weights_only=True))


def _check_loadable(what: str, value: object) -> None:
    try:
        copy_as_saved(value)
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise CheckpointError(
            f"{what} of type {type(value).__name__} cannot be saved without a pickle that executes "
            f"code ({str(error).splitlines()[0] if str(error) else type(error).__name__}); store "
            "numbers, strings, tensors, or lists and dictionaries of these"
        ) from error
