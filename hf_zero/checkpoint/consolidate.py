"""Whole weights of a checkpoint as a state dict, in a plain module or as a folder of safetensors,
through functions with DeepSpeed's names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from hf_zero.checkpoint.convert.export import convert_checkpoint
from hf_zero.checkpoint.convert.outputs import (
    DtypeName,
    OutputTensor,
    choose,
    dtype_option,
    outputs,
    tied_names,
)
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.parameter_names import pair_names, strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint, open_checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed


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
        values: dict[str, torch.Tensor] = {
            name: value
            for name, value in model.state_dict().items()
            if name.rpartition(".")[2] != EXTRA_STATE
        }
        sources = _sources_of(values, checkpoint)
        with torch.no_grad():
            for name, output in sources.items():
                # A tensor whose memory is not its values in order is filled through a copy. It is
                # not written where the values are equal: an expanded constant cannot be.
                value = values[name]
                direct = value.is_contiguous() and not (value.is_conj() or value.is_neg())
                tensor = value if direct else torch.empty(output.shape, dtype=output.dtype)
                output.fill(checkpoint, tensor)
                if not direct and not torch.equal(value.cpu(), tensor):
                    value.copy_(tensor)
    return model


def _sources_of(
    values: Mapping[str, torch.Tensor], checkpoint: Checkpoint
) -> dict[str, OutputTensor]:
    """Return by name the tensor of ``checkpoint`` for each of ``values``, the state dict of a
    model; none for frozen parameters that were not saved. Raises CheckpointError if they do not
    match, or if a value has no memory.
    """
    if empty := [name for name, value in values.items() if value.is_meta]:
        raise CheckpointError(
            f"the model has no memory for {listed(empty)}, on the meta device; call "
            'model.to_empty(device="cpu") before the load'
        )
    manifest = checkpoint.manifest
    saved, tied = {output.name: output for output in outputs(manifest)}, tied_names(manifest)
    saved |= {name: saved[first] for name, first in tied.items() if first in saved}
    excluded = {strip_wrappers(name) for name in manifest.excluded}
    excluded |= {name for name, first in tied.items() if first in excluded}
    pairs = pair_names(values, saved)
    used = {*pairs.values()}
    faults = {
        "lacks": [n for n in values if n not in pairs and strip_wrappers(n) not in excluded],
        "has in excess": [name for name in saved if name not in used],
        "has in another shape": [
            name for name, key in pairs.items() if tuple(values[name].shape) != saved[key].shape
        ],
    }
    for fault, names in faults.items():
        if names:
            raise CheckpointError(
                f"{checkpoint.folder} {fault} {listed(names)}; build the model with the "
                "configuration it was saved with"
            )
    return {name: saved[key] for name, key in pairs.items()}


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
