"""What a save is going to write, put together before a byte is written: this rank's file, and
what rank 0 says about all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import hf_zero
from hf_zero.checkpoint import contents, objects
from hf_zero.checkpoint.contract import Engine
from hf_zero.checkpoint.manifest import FORMAT, Manifest
from hf_zero.checkpoint.records import (
    Chunk,
    FileEntry,
    FlatEntry,
    GroupEntry,
    OptimizerEntry,
    dtype_of,
)
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, Plan, plan_file


@dataclass(frozen=True)
class Written:
    """What one rank tells rank 0: its file, the chunks in it by flat, the numbers of each
    optimizer group and of parameters in it.
    """

    file: FileEntry
    chunks: dict[str, tuple[int, int, tuple[str, ...]]]
    scalars: list[dict[str, Any]]
    apart: list[dict[str, Any]]


@dataclass(frozen=True)
class Draft:
    """The file of this rank: where everything stands in it, and what fetches it."""

    plan: Plan
    tensors: dict[str, contents.Held]
    written: Written  # its file is still without a hash

    def hashed(self, digest: str) -> Written:
        return replace(self.written, file=replace(self.written.file, hash=digest))


@dataclass(frozen=True)
class Extra:
    """State that is no tensor, in the manifest's form, and what of it goes to ``objects.pt``."""

    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    objects: dict[str, dict[str, Any]]


def draft(engine: Engine, name: str, save_id: str, exclude_frozen: bool) -> Draft:
    """The file ``name`` of this rank."""
    tensors: dict[str, contents.Held] = {}
    chunks: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    for flat in engine.flats:
        if not flat.writes or (exclude_frozen and not flat.trainable):
            continue
        held = contents.flat_tensors(flat, engine.bound)
        tensors |= {f"{flat.key}::{name}": each for name, each in held.items()}
        chunks[flat.key] = (*flat.owned, tuple(held))
    if engine.global_rank == 0:
        buffers = contents.persistent_buffers(
            engine.module, contents.frozen(engine) if exclude_frozen else ()
        )
        tensors |= {
            contents.BUFFER + name: contents.Held.here(buffer) for name, buffer in buffers.items()
        }
    tensors |= {name: contents.Held.here(state) for name, state in contents.rng_states().items()}
    metadata = {"format": FORMAT, "save_id": save_id, "rank": str(engine.global_rank)}
    plan = plan_file(
        [(name, each.dtype, [each.numel]) for name, each in tensors.items()],
        metadata,
        DATA_ALIGNMENT,
    )
    file = FileEntry(name, engine.global_rank, plan.size, "")
    return Draft(
        plan, tensors, Written(file, chunks, contents.scalars_of(engine), contents.apart_of(engine))
    )


def extra_of(engine: Engine, client_state: Mapping[str, Any]) -> Extra:
    """State that is no tensor, as it is now. Raises CheckpointError naming what cannot be saved."""
    client, objects_of_client = objects.split("client_state", client_state)
    scheduler: dict[str, Any] | None = None
    objects_of_scheduler: dict[str, Any] = {}
    if hasattr(engine.lr_scheduler, "state_dict"):
        state, objects_of_scheduler = objects.split(
            "the state of the lr scheduler", engine.lr_scheduler.state_dict()
        )
        scheduler = {"class": contents.class_name(engine.lr_scheduler), "state": state}
    return Extra(
        client, scheduler, {"client_state": objects_of_client, "lr_scheduler": objects_of_scheduler}
    )


def describe(
    engine: Engine,
    tag: str,
    save_id: str,
    written: list[Written],
    extra: Extra,
    exclude_frozen: bool,
) -> Manifest:
    """The manifest, still without its ``objects``; nothing in it changes with the engine any
    more.
    """
    flats, excluded = [], []
    dtypes: dict[str, torch.dtype] = {}
    for flat in engine.flats:
        names = [slot.name for slot in flat.layout.slots]
        if exclude_frozen and not flat.trainable:
            excluded += names
            continue
        held = sorted(
            (report.chunks[flat.key][0], file, report.chunks[flat.key])
            for file, report in enumerate(written)
            if flat.key in report.chunks
        )
        chunks = tuple(
            Chunk(file, start, stop, tensors) for _, file, (start, stop, tensors) in held
        )
        flats.append(FlatEntry(flat.key, flat.trainable, flat.dtype, flat.layout, chunks, flat.raw))
        dtypes |= {name: dtype_of(engine.param_dtypes[name]) for name in names}
    manifest = Manifest(
        save_id=save_id,
        tag=tag,
        world={
            "size": engine.world_size,
            "shard": engine.shard_world,
            "replicate": engine.world_size // engine.shard_world,
        },
        stage=engine.stage,
        precision=engine.config.precision,
        files=tuple(report.file for report in written),
        flats=tuple(flats),
        parameters={
            name: dtypes[name]
            for name in contents.model_order(engine.module, engine.aliases, dtypes)
        },
        buffers={
            name: (b.dtype, tuple(b.shape))
            for name, b in contents.persistent_buffers(engine.module, frozenset(excluded)).items()
        },
        aliases=dict(engine.aliases),
        excluded=tuple(excluded),
        export=contents.export_of(engine.module, engine.aliases),
        optimizer=_optimizer(engine, written),
        scaler=engine.scaler.state_dict() if engine.config.precision == "fp16" else None,
        lr_scheduler=extra.lr_scheduler,
        counters=asdict(engine.counters),
        client_state=extra.client_state,
        objects=None,
        software={"hf_zero": hf_zero.__version__, "torch": torch.__version__},
    )
    return deepcopy(manifest)


def _optimizer(engine: Engine, written: list[Written]) -> OptimizerEntry | None:
    if engine.bound is None:
        return None
    groups = []
    for index, hyperparameters in enumerate(engine.bound.hyperparameters()):
        # A group can be empty on a rank, which then has no numbers for it; where there are some,
        # they are equal, except that a rank tells those of each parameter once it has seen one left
        # out. What no rank has left out has made every step.
        even = [
            report.scalars[index]
            for report in written
            if report.scalars[index] and not report.apart[index]
        ]
        own = {name: numbers for report in written for name, numbers in report.apart[index].items()}
        scalars = (
            even[0]
            if even
            else max(own.values(), key=lambda numbers: numbers.get("step", 0.0), default={})
        )
        apart = {name: numbers for name, numbers in own.items() if numbers != scalars}
        names = sorted(name for name, group in engine.bound.group_of.items() if group == index)
        groups.append(GroupEntry(dict(hyperparameters), scalars, tuple(names), apart))
    return OptimizerEntry(contents.class_name(engine.bound.optimizer), tuple(groups))
