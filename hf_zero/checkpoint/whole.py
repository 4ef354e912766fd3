"""The whole model in its working precision, straight from the engine into one file, tensor by
tensor.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hf_zero.checkpoint import contents, folders
from hf_zero.checkpoint.contract import Engine
from hf_zero.checkpoint.places import on_this_machine
from hf_zero.checkpoint.tensorfile import Plan, bytes_view, plan_file, write_all
from hf_zero.checkpoint.together import together


def save_whole(
    engine: Engine,
    directory: str | os.PathLike[str],
    filename: str = "model.safetensors",
    exclude_frozen_parameters: bool = False,
) -> Path:
    """Write parameters and buffers to ``directory/filename`` from rank 0, and return that path.
    Collective.

    A name that ends in ``.safetensors`` is written a tensor at a time, tied weights once, under the
    names that Hugging Face keeps. Any other is written by ``torch.save`` as a state dict, for which
    rank 0 holds the whole model.

    Raises:
        CheckpointError: on all ranks, if rank 0 could not write. A file that stood there stays.
    """
    path = on_this_machine(directory, "one file of the whole model") / filename
    temporary = path.with_name(f"{folders.NEW}{path.name}")
    failed: list[Exception] = []
    if path.suffix == ".safetensors":
        _stream(engine, temporary, exclude_frozen_parameters, failed)
    else:
        state = engine._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if engine.global_rank == 0:
            try:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, temporary)
            except Exception as error:
                failed.append(error)

    def finish() -> None:
        if failed:
            temporary.unlink(missing_ok=True)
            raise failed[0]
        if engine.global_rank == 0:
            os.replace(temporary, path)
            folders.fsync_folder(path.parent)

    together(engine.comm, finish, path)
    return path


def _stream(engine: Engine, temporary: Path, exclude_frozen: bool, failed: list[Exception]) -> None:
    """Write on rank 0 while every rank takes part in the gathers; an error there is kept for
    after the last of them.
    """
    plan, saved_as = _plan(engine, exclude_frozen)
    places = {entry.name: len(plan.header) + entry.begin for entry in plan.entries}
    fd = -1
    if engine.global_rank == 0:
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            write_all(fd, memoryview(plan.header), 0)
            for name, buffer in contents.persistent_buffers(engine.module).items():
                if name in places:
                    write_all(fd, bytes_view(buffer.detach().cpu().contiguous()), places[name])
        except Exception as error:
            failed.append(error)
    try:
        for name, tensor in engine.consolidated():
            if fd >= 0 and not failed and saved_as.get(name) in places:
                try:
                    write_all(fd, bytes_view(tensor), places[saved_as[name]])
                except Exception as error:
                    failed.append(error)
        if fd >= 0:
            os.fsync(fd)
    finally:
        if fd >= 0:
            os.close(fd)


def _plan(engine: Engine, exclude_frozen: bool) -> tuple[Plan, dict[str, str]]:
    """The file, and under which name each parameter stands in it."""
    export = contents.export_of(engine.module, engine.aliases)
    held = {
        slot.name: (flat.dtype, slot.shape)
        for flat in engine.flats
        if flat.trainable or not exclude_frozen
        for slot in flat.layout.slots
    }
    saved_as = {
        name: export.names.get(name, name)
        for name in contents.model_order(engine.module, engine.aliases, held)
    }
    tensors = [(saved_as[name], *held[name]) for name in saved_as]
    buffers = contents.persistent_buffers(
        engine.module, contents.frozen(engine) if exclude_frozen else ()
    )
    tensors += [(name, b.dtype, tuple(b.shape)) for name, b in buffers.items()]
    return plan_file(
        [tensor for tensor in tensors if tensor[0] not in export.skip], {"format": "pt"}
    ), saved_as
