"""One file of the whole model, written by rank 0 from a live engine, whose units are gathered one
after another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint import find, save_plan, storage
from hf_zero.checkpoint.convert.outputs import OutputTensor, exported, plan_outputs
from hf_zero.checkpoint.convert.targets import torch_save
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.model_entries import export_of, model_order
from hf_zero.checkpoint.tensorfile import bytes_view
from hf_zero.errors import CheckpointError
from hf_zero.zero.access.consolidate import gather_state_dict
from hf_zero.zero.layout.whole_names import WholeNames

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


def save_whole(
    engine: TrainingEngine,
    directory: str | os.PathLike[str],
    filename: str,
    exclude_frozen_parameters: bool,
) -> Path:
    """Write parameters and buffers to ``directory/filename`` from rank 0, and return that path.
    Collective.

    A name that ends in ``.safetensors`` is written tensor by tensor, tied weights once, under the
    names that Hugging Face keeps. Any other file is a state dict written by ``torch.save``, for
    which rank 0 holds the whole model in memory.

    Raises:
        CheckpointError: for a ``filename`` that is no name; on all ranks, if rank 0 could not
            write. An existing file is then kept.
    """
    if not isinstance(filename, (str, os.PathLike)) or not os.fspath(filename):
        raise CheckpointError(f"{filename!r} is no name of a file; pass one, as model.safetensors")
    engine.refuse_destroyed("save")
    engine.changes.refuse("a save")
    path = storage.local_path(directory, "one file of the whole model") / filename
    temporary = path.with_name(f"{find.NEW}{path.name}")
    # of experts that other ranks number from 0 on
    elsewhere = save_plan.buffers_of_other_stages(
        engine, WholeNames(engine.module), exclude_frozen_parameters
    )
    write = _write_tensors if path.name.endswith(".safetensors") else _write_state_dict

    def discard() -> None:
        if engine.global_rank == 0:
            with suppress(OSError, ValueError):  # there may be no folder, or a NUL in the name
                temporary.unlink()

    def publish() -> None:
        if error is not None:
            discard()  # before the other ranks hear of it
            raise error
        if engine.global_rank == 0:
            os.replace(temporary, path)
            storage.fsync_path(path.parent)

    try:
        error = write(engine, temporary, elsewhere, exclude_frozen_parameters)
        collective_try(engine.mesh, publish, path)
    except BaseException:  # of a gather, too
        discard()
        raise
    return path


def _write_state_dict(
    engine: TrainingEngine, path: Path, elsewhere: Mapping[str, torch.Tensor], exclude_frozen: bool
) -> Exception | None:
    """Write the state dict, with the buffers ``elsewhere`` that rank 0 lacks, to ``path`` on rank
    0, and return the error of that. Collective.
    """
    build = gather_state_dict(engine, False, exclude_frozen)
    if build is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = build()
        state.update(elsewhere)
        torch_save(state, path)
        storage.fsync_path(path)
    except Exception as error:
        return error
    return None


def _write_tensors(
    engine: TrainingEngine, path: Path, elsewhere: Mapping[str, torch.Tensor], exclude_frozen: bool
) -> Exception | None:
    """Write a safetensors file, with the buffers ``elsewhere`` that rank 0 lacks, to ``path`` on
    rank 0 while every rank takes part in the gathers; return the first error of that. Collective.
    """
    buffers = save_plan.model_buffers(engine, exclude_frozen) | dict(elsewhere)
    chosen = _outputs_of(engine, buffers, exclude_frozen)
    plan = plan_outputs(chosen)
    begins = {entry.name: len(plan.header) + entry.begin for entry in plan.entries}
    places = {output.held: begins[output.name] for output in chosen}
    if engine.global_rank:
        for _ in engine.consolidated():
            pass
        return None
    file = _FileOfGathers(path)
    try:
        file.write(plan.header, 0)
        for name, tensor in chain(buffers.items(), engine.consolidated()):
            if name in places:
                file.write(tensor, places[name])
    finally:
        file.close()
    return file.error


class _FileOfGathers:
    """The file ``path``, written at offsets beside gathers. After an ``error``, nothing more is
    written: the rank must take part in the rest of the gathers before it raises.
    """

    def __init__(self, path: Path) -> None:
        self.error: Exception | None = None
        self._fd = -1
        with self._keeping_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, values: torch.Tensor | bytes, at: int) -> None:
        """Write ``values`` at byte ``at``, unless there is an error."""
        if self.error is not None:
            return
        with self._keeping_error():
            if isinstance(values, torch.Tensor):
                data = bytes_view(values.detach().cpu().contiguous())
            else:
                data = memoryview(values)
            storage.write_all(self._fd, data, at)

    def close(self) -> None:
        """Flush the file to the device, which may refuse now what was written, and close it."""
        if self._fd < 0:
            return
        with self._keeping_error():
            try:
                os.fsync(self._fd)
            finally:
                os.close(self._fd)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error


def _outputs_of(
    engine: TrainingEngine, buffers: Mapping[str, torch.Tensor], exclude_frozen: bool
) -> list[OutputTensor]:
    """Return the parameters in the model's order, then ``buffers``, as the file has them."""
    names = WholeNames(engine.module)
    export = export_of(engine.module, engine.aliases, names)
    shapes = {
        alias: (flat.dtype, slot.whole)
        for flat in engine.flats
        if not flat.spec.outside and (flat.trainable or not exclude_frozen)
        for slot in flat.layout.slots
        for alias in names.every(slot.name)
    }
    parameters = [
        OutputTensor(name, name, *shapes[name])
        for name in model_order(engine.module, engine.aliases, shapes)
    ]
    buffer_outputs = [
        OutputTensor(name, name, buffer.dtype, tuple(buffer.shape), is_buffer=True)
        for name, buffer in buffers.items()
    ]
    return exported(parameters + buffer_outputs, export)
