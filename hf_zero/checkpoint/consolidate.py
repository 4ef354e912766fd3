"""The whole model as one state dict or one file: from a checkpoint, through functions with
DeepSpeed's names, or directly from a live engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from hf_zero.checkpoint import find, save_plan, storage
from hf_zero.checkpoint.convert.export import convert_checkpoint
from hf_zero.checkpoint.convert.files import torch_save
from hf_zero.checkpoint.convert.outputs import (
    DtypeName,
    OutputTensor,
    choose,
    dtype_option,
    exported,
    outputs,
    plan_outputs,
    tied_names,
)
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.parameter_names import pair_names, strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint, open_checkpoint
from hf_zero.checkpoint.storage import local_path, write_all
from hf_zero.checkpoint.tensorfile import bytes_view
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed
from hf_zero.zero.access.consolidate import gather_state_dict
from hf_zero.zero.layout.whole_names import WholeNames

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


@dataclass(frozen=True, eq=False)
class UnreadTensor:
    """A tensor of a checkpoint that :meth:`contiguous` reads, anew at each call."""

    _checkpoint: Checkpoint
    _output: OutputTensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._output.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._output.dtype

    def contiguous(self) -> torch.Tensor:
        """Return the tensor on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self._output.fill(self._checkpoint, tensor)
        return tensor


def iterate_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    dtype: DtypeName | torch.dtype | None = "float32",
    exclude_frozen_parameters: bool = False,
    only: str | Sequence[str] | None = None,
    verify: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole CPU tensor of each parameter and buffer, one at a time. Tied
    weights are yielded once.

    With ``dtype`` None each parameter has the dtype it had when it was handed to training. ``only``
    gives patterns for the names (``"*.lora_?.*"``); no other tensor is read. ``verify`` compares
    what is read with the block hashes. Raises ConfigError for a pattern that matches no tensor.
    """
    with open_checkpoint(find_checkpoint(checkpoint_dir, tag), hashes=verify) as checkpoint:
        for output in choose(
            outputs(checkpoint.manifest, dtype_option(dtype), exclude_frozen_parameters), only
        ):
            yield output.name, UnreadTensor(checkpoint, output).contiguous()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    *,
    verify: bool = True,
) -> dict[str, UnreadTensor | torch.Tensor]:
    """Return the consolidated float32 state dict on the CPU. Tied names share a tensor.

    Needs host memory for the whole model; with ``lazy_mode`` the values are :class:`UnreadTensor`,
    and need none. ``verify`` as in :func:`iterate_state_dict`.
    """
    opened = open_checkpoint(find_checkpoint(checkpoint_dir, tag), hashes=verify)
    tensors = outputs(opened.manifest, torch.float32, exclude_frozen_parameters)
    state: dict[str, UnreadTensor | torch.Tensor] = {
        output.name: UnreadTensor(opened, output) for output in tensors
    }
    if not lazy_mode:  # else it stays open for as long as one of its tensors lives
        with opened:
            state = {name: tensor.contiguous() for name, tensor in state.items()}
    tied = tied_names(opened.manifest)
    return state | {name: state[of] for name, of in tied.items() if of in state}


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    verify: bool = True,
) -> torch.nn.Module:
    """Copy a checkpoint into ``model``, a plain module on any device, tensor by tensor, and return
    ``model``. ``verify`` as in :func:`iterate_state_dict`.

    Extra state of modules (``get_extra_state``) keeps its values: no checkpoint has it. Raises
    CheckpointError, before anything is copied, for names that only one side has, for shapes that
    differ, and for a model on the meta device.
    """
    with open_checkpoint(find_checkpoint(checkpoint_dir, tag), hashes=verify) as checkpoint:
        manifest = checkpoint.manifest
        saved = {output.name: output for output in outputs(manifest)}
        tied = tied_names(manifest)
        saved |= {name: saved[other] for name, other in tied.items() if other in saved}
        values = {
            name: value
            for name, value in model.state_dict().items()
            if name.rpartition(".")[2] != EXTRA_STATE
        }
        if empty := [name for name, value in values.items() if value.is_meta]:
            raise CheckpointError(
                f"the model has no memory for {listed(empty)}, on the meta device; call "
                'model.to_empty(device="cpu") before the load'
            )
        pairs = pair_names(values, saved)
        excluded = {strip_wrappers(name) for name in manifest.excluded}
        excluded |= {name for name, other in tied.items() if other in excluded}
        missing = [
            name for name in values if name not in pairs and strip_wrappers(name) not in excluded
        ]
        used = {*pairs.values()}
        unexpected = [name for name in saved if name not in used]
        wrong = [
            name for name, key in pairs.items() if tuple(values[name].shape) != saved[key].shape
        ]
        for what, names in (
            ("lacks", missing),
            ("has in excess", unexpected),
            ("has in another shape", wrong),
        ):
            if names:
                raise CheckpointError(
                    f"{checkpoint.folder} {what} {listed(names)}; build the model with the "
                    "configuration it was saved with"
                )
        with torch.no_grad():
            for name, key in pairs.items():
                output = saved[key]
                # A tensor whose memory is not its values in order is filled through a copy. It is
                # not written where the values are equal: an expanded constant cannot be.
                value = values[name]
                direct = value.is_contiguous() and not (value.is_conj() or value.is_neg())
                tensor = value if direct else torch.empty(output.shape, dtype=output.dtype)
                output.fill(checkpoint, tensor)
                if not direct and not torch.equal(value.cpu(), tensor):
                    value.copy_(tensor)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    verify: bool = True,
) -> Path:
    """Write the consolidated float32 model to ``output_dir`` and return that folder.

    Writes the whole model as safetensors, whatever ``safe_serialization`` says: never a pickle,
    never adapters alone. ``verify`` as in :func:`iterate_state_dict`.
    """

    return convert_checkpoint(
        checkpoint_dir,
        output_dir,
        "float32",
        max_shard_size,
        tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
        verify=None if verify else False,
        adapters=False,
    ).folder


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
        CheckpointError: on all ranks, if rank 0 could not write. An existing file is then kept.
    """
    engine.refuse_destroyed("save")
    engine.changes.refuse("a save")
    path = local_path(directory, "one file of the whole model") / filename
    temporary = path.with_name(f"{find.NEW}{path.name}")
    failed: list[Exception] = []
    # of experts that other ranks number from 0 on
    elsewhere = save_plan.buffers_of_other_stages(
        engine, WholeNames(engine.module), exclude_frozen_parameters
    )
    if path.suffix == ".safetensors":
        _stream(engine, temporary, elsewhere, exclude_frozen_parameters, failed)
    else:
        build = gather_state_dict(engine, False, exclude_frozen_parameters)
        if build is not None:
            try:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                state = build()
                state.update(elsewhere)
                torch_save(state, temporary)
            except Exception as error:
                failed.append(error)

    def finish() -> None:
        if failed:
            temporary.unlink(missing_ok=True)
            raise failed[0]
        if engine.global_rank == 0:
            os.replace(temporary, path)
            storage.fsync_path(path.parent)

    collective_try(engine.mesh, finish, path)
    return path


def _stream(
    engine: TrainingEngine,
    temporary: Path,
    elsewhere: Mapping[str, torch.Tensor],
    exclude_frozen: bool,
    failed: list[Exception],
) -> None:
    """Write the file on rank 0 while every rank takes part in the gathers; ``elsewhere``: buffers
    that rank 0 lacks. Errors on rank 0 are appended to ``failed``, to be raised after the last
    gather.
    """
    buffers = save_plan.model_buffers(engine, exclude_frozen) | dict(elsewhere)
    chosen = _outputs_of(engine, buffers, exclude_frozen)
    plan = plan_outputs(chosen)
    begins = {entry.name: len(plan.header) + entry.begin for entry in plan.entries}
    places = {output.held: begins[output.name] for output in chosen}
    fd = -1
    if engine.global_rank == 0:
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            write_all(fd, memoryview(plan.header), 0)
            for name, buffer in buffers.items():
                if name in places:
                    write_all(fd, bytes_view(buffer.detach().cpu().contiguous()), places[name])
        except Exception as error:
            failed.append(error)
    try:
        for name, tensor in engine.consolidated():
            if fd >= 0 and not failed and name in places:
                try:
                    write_all(fd, bytes_view(tensor), places[name])
                except Exception as error:
                    failed.append(error)
    finally:
        if fd >= 0:
            try:  # a file system may refuse what was written only now
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                failed.append(error)


def _outputs_of(
    engine: TrainingEngine, buffers: Mapping[str, torch.Tensor], exclude_frozen: bool
) -> list[OutputTensor]:
    """Return the parameters in the model's order, then ``buffers``, as the file has them."""
    names = WholeNames(engine.module)
    export = save_plan.export_of(engine.module, engine.aliases, names)
    shapes = {
        alias: (flat.dtype, slot.whole)
        for flat in engine.flats
        if not flat.spec.outside and (flat.trainable or not exclude_frozen)
        for slot in flat.layout.slots
        for alias in names.every(slot.name)
    }
    results = [
        OutputTensor(name, name, *shapes[name])
        for name in save_plan.model_order(engine.module, engine.aliases, shapes)
    ]
    results += [
        OutputTensor(name, name, buffer.dtype, tuple(buffer.shape), is_buffer=True)
        for name, buffer in buffers.items()
    ]
    return exported(results, export)
