"""A checkpoint as one state dict, under the names that scripts for DeepSpeed call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hf_zero.checkpoint.choosing import choose
from hf_zero.checkpoint.finding import find
from hf_zero.checkpoint.matching import listed
from hf_zero.checkpoint.naming import bare, pairing
from hf_zero.checkpoint.opened import open_checkpoint
from hf_zero.checkpoint.outputs import dtype_option, outputs
from hf_zero.errors import CheckpointError


def iterate_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    dtype: str | torch.dtype | None = "float32",
    exclude_frozen_parameters: bool = False,
    only: str | Sequence[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole CPU tensor of each parameter and buffer; one tensor is made at a time. Tied
    ones come once.

    ``dtype`` None gives each parameter the dtype it had when it was handed to training. ``only``
    are patterns over the names (``"*.lora_?.*"``): nothing else is read. Raises ConfigError for a
    pattern that fits no tensor.
    """
    with open_checkpoint(find(checkpoint_dir, tag)) as checkpoint:
        for output in choose(
            outputs(checkpoint.manifest, dtype_option(dtype), exclude_frozen_parameters), only
        ):
            tensor = torch.empty(output.shape, dtype=output.dtype)
            output.fill(checkpoint, tensor)
            yield output.name, tensor


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> dict[str, torch.Tensor]:
    """The consolidated float32 state dict on the CPU; tied names share a tensor.

    Needs memory for the whole model.
    """
    folder = find(checkpoint_dir, tag)
    state = dict(iterate_state_dict(folder, None, "float32", exclude_frozen_parameters))
    with open_checkpoint(folder) as checkpoint:
        state |= {
            bare(tied): state[bare(held)]
            for tied, held in checkpoint.manifest.aliases.items()
            if bare(held) in state
        }
    return state


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Copy a checkpoint into ``model``, a plain module on any device, tensor by tensor, and return
    it.

    Raises CheckpointError, before anything is copied, for names that only one side has and for
    shapes that differ.
    """
    with open_checkpoint(find(checkpoint_dir, tag)) as checkpoint:
        manifest = checkpoint.manifest
        given = {output.name: output for output in outputs(manifest)}
        given |= {
            bare(tied): given[bare(held)]
            for tied, held in manifest.aliases.items()
            if bare(held) in given
        }
        wanted = model.state_dict()
        there = pairing(wanted, given)
        excluded = {bare(name) for name in manifest.excluded}
        excluded |= {
            bare(tied) for tied, held in manifest.aliases.items() if bare(held) in excluded
        }
        missing = [name for name in wanted if name not in there and bare(name) not in excluded]
        used = {*there.values()}
        unexpected = [name for name in given if name not in used]
        wrong = [
            name for name, held in there.items() if tuple(wanted[name].shape) != given[held].shape
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
            for name, held in there.items():
                output = given[held]
                # A tensor that is not contiguous is filled by way of one that is; an expanded
                # constant need not be.
                contiguous = wanted[name].is_contiguous()
                tensor = (
                    wanted[name] if contiguous else torch.empty(output.shape, dtype=output.dtype)
                )
                output.fill(checkpoint, tensor)
                if not contiguous and not torch.equal(wanted[name].cpu(), tensor):
                    wanted[name].copy_(tensor)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> Path:
    """Write the consolidated float32 model to ``output_dir`` and return it.

    Always safetensors, never a pickle, and never adapters alone.
    """
    from hf_zero.checkpoint.export import convert_checkpoint

    return convert_checkpoint(
        checkpoint_dir,
        output_dir,
        "float32",
        max_shard_size,
        tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
        adapters=False,
    ).folder
