"""Saving: every rank writes its own file into a temporary folder, which then becomes the checkpoint by a rename."""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import hf_zero
from hf_zero.checkpoint import contents, folders, objects
from hf_zero.checkpoint.contract import Engine
from hf_zero.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    Chunk,
    FileEntry,
    FlatEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    dtype_of,
)
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, plan_file, write_tensors
from hf_zero.checkpoint.together import together
from hf_zero.errors import CheckpointError

SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True)
class Written:
    """What one rank tells rank 0: its file, the chunks in it by flat, the numbers of each optimizer group."""

    file: FileEntry
    chunks: dict[str, tuple[int, int, tuple[str, ...]]]
    scalars: list[dict[str, Any]]


@dataclass(frozen=True)
class _Extra:
    """State that is no tensor, in the manifest's form, and what of it goes to ``objects.pt``."""

    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    objects: dict[str, dict[str, Any]]


def save(
    engine: Engine,
    directory: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    exclude_frozen_parameters: bool = False,
    save_latest: bool = True,
) -> Path:
    """Save ``engine`` as ``<directory>/<tag>`` and return that folder. Collective.

    Args:
        directory: a folder that all ranks see; made if it does not exist.
        tag: name of the checkpoint, the same on all ranks; ``global_step<N>`` by default.
        client_state: what to hand back at the load; rank 0's is saved (FORMAT.md section 5 says what it may hold).
        exclude_frozen_parameters: leave out parameters that are not trained.
        save_latest: whether ``latest`` is to name this tag.

    Raises:
        CheckpointError: on all ranks, if anything failed on one. Nothing that was saved before is touched then.
    """
    root, rank, comm = Path(directory), engine.global_rank, engine.comm
    name = f"global_step{engine.counters.global_steps}" if tag is None else str(tag)
    untouched = f"Nothing was saved as {name!r}; earlier checkpoints are as they were."
    names = together(comm, lambda: folders.check_tag(name), root)
    if len(set(names)) > 1:
        raise CheckpointError(f"the ranks want to save under different tags {sorted(set(names))}; pass the same tag on every rank")
    temporary, final = root / (folders.SAVING + name), root / name
    extra: list[_Extra] = []

    def begin() -> str:
        if rank != 0:
            return ""
        extra.append(_extra(engine, client_state or {}))  # first: what cannot be saved is found out before anything is written
        folders.begin(root, name)
        return secrets.token_hex(16)

    try:
        save_id = together(comm, begin, temporary, untouched)[0]
        path = temporary / folders.rank_file(rank, engine.world_size)
        written = together(comm, lambda: _write_rank(engine, path, save_id, exclude_frozen_parameters), path, untouched)

        def finish() -> None:
            if rank == 0:
                manifest = _describe(engine, name, save_id, written, extra[0], exclude_frozen_parameters)
                _write_rest(engine, temporary, manifest, extra[0].objects, save_latest)
                folders.publish(temporary, name)

        together(comm, finish, temporary, untouched)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    together(comm, lambda: _announce(final) if rank == 0 else None, final, f"{final} itself is whole; pass its tag to load it.")
    return final


def _write_rank(engine: Engine, path: Path, save_id: str, exclude_frozen: bool) -> Written:
    """Write this rank's file."""
    tensors: dict[str, contents.Held] = {}
    chunks: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    for flat in engine.flats:
        if not flat.writes or (exclude_frozen and not flat.trainable):
            continue
        held = contents.flat_tensors(flat, engine.bound)
        tensors |= {f"{flat.key}::{name}": each for name, each in held.items()}
        chunks[flat.key] = (*flat.owned, tuple(held))
    if engine.global_rank == 0:
        buffers = contents.persistent_buffers(engine.module, contents.frozen(engine) if exclude_frozen else ())
        tensors |= {contents.BUFFER + name: contents.Held.here(buffer) for name, buffer in buffers.items()}
    tensors |= {name: contents.Held.here(state) for name, state in contents.rng_states().items()}
    metadata = {"format": FORMAT, "save_id": save_id, "rank": str(engine.global_rank)}
    plan = plan_file([(name, each.dtype, [each.numel]) for name, each in tensors.items()], metadata, DATA_ALIGNMENT)
    digest = write_tensors(path, plan, {name: each.values for name, each in tensors.items()})
    return Written(FileEntry(path.name, engine.global_rank, plan.size, digest), chunks, contents.scalars_of(engine))


def _extra(engine: Engine, client_state: Mapping[str, Any]) -> _Extra:
    client, objects_of_client = objects.split("client_state", client_state)
    scheduler: dict[str, Any] | None = None
    objects_of_scheduler: dict[str, Any] = {}
    if hasattr(engine.lr_scheduler, "state_dict"):
        state, objects_of_scheduler = objects.split("the state of the lr scheduler", engine.lr_scheduler.state_dict())
        scheduler = {"class": contents.class_name(engine.lr_scheduler), "state": state}
    return _Extra(client, scheduler, {"client_state": objects_of_client, "lr_scheduler": objects_of_scheduler})


def _describe(engine: Engine, tag: str, save_id: str, written: list[Written], extra: _Extra, exclude_frozen: bool) -> Manifest:
    """The manifest, still without its ``objects``."""
    flats, excluded = [], []
    dtypes: dict[str, torch.dtype] = {}
    for flat in engine.flats:
        names = [slot.name for slot in flat.layout.slots]
        if exclude_frozen and not flat.trainable:
            excluded += names
            continue
        held = sorted(
            (report.chunks[flat.key][0], file, report.chunks[flat.key]) for file, report in enumerate(written) if flat.key in report.chunks
        )
        chunks = tuple(Chunk(file, start, stop, tensors) for _, file, (start, stop, tensors) in held)
        flats.append(FlatEntry(flat.key, flat.trainable, flat.dtype, flat.layout, chunks, flat.raw))
        dtypes |= {name: dtype_of(engine.param_dtypes[name]) for name in names}
    return Manifest(
        save_id=save_id,
        tag=tag,
        world={"size": engine.world_size, "shard": engine.shard_world, "replicate": engine.world_size // engine.shard_world},
        stage=engine.stage,
        precision=engine.config.precision,
        files=tuple(report.file for report in written),
        flats=tuple(flats),
        parameters={name: dtypes[name] for name in contents.model_order(engine.module, engine.aliases, dtypes)},
        buffers={name: (b.dtype, tuple(b.shape)) for name, b in contents.persistent_buffers(engine.module, frozenset(excluded)).items()},
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


def _optimizer(engine: Engine, written: list[Written]) -> OptimizerEntry | None:
    if engine.bound is None:
        return None
    groups = []
    for index, hyperparameters in enumerate(engine.bound.hyperparameters()):
        # A group can be empty on a rank, which then has no numbers for it; where there are some, they are equal.
        scalars = next((report.scalars[index] for report in written if report.scalars[index]), {})
        names = sorted(name for name, group in engine.bound.group_of.items() if group == index)
        groups.append(GroupEntry(dict(hyperparameters), scalars, tuple(names)))
    return OptimizerEntry(contents.class_name(engine.bound.optimizer), tuple(groups))


def _write_rest(engine: Engine, folder: Path, manifest: Manifest, state: dict[str, dict[str, Any]], save_latest: bool) -> None:
    """All files but the ranks' own; the manifest last, and read back."""
    for name, content in contents.companions(engine.module).items():
        folders.write_file(folder / name, content)
    if any(state.values()):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        folders.write_file(folder / folders.OBJECTS_NAME, content)
        manifest = replace(manifest, objects=FileEntry(folders.OBJECTS_NAME, 0, len(content), sha256(content).hexdigest()))
    # Written now, moved to their places by _announce: a disk that fills up is found out before anything has changed.
    folders.write_file(folder / (folders.NEW + SCRIPT), Path(__file__).with_name(SCRIPT).read_bytes())
    if save_latest:
        folders.write_file(folder / (folders.NEW + folders.LATEST), manifest.tag.encode())
    folders.write_file(folder / MANIFEST_NAME, manifest.dumps())
    Manifest.read(folder / MANIFEST_NAME)


def _announce(final: Path) -> None:
    """Move ``zero_to_fp32.py`` and ``latest`` to their places, then drop the checkpoint that this one replaces."""
    for name in (SCRIPT, folders.LATEST):
        if (final / (folders.NEW + name)).exists():
            os.replace(final / (folders.NEW + name), final.parent / name)
    folders.fsync_folder(final.parent)
    folders.discard_replaced(final)
