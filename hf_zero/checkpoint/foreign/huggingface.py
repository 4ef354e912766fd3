"""Model folders that ``save_pretrained`` writes: safetensors, one file or several with an index. Weights alone, as they are named there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from hf_zero.checkpoint.foreign.assembled import SHARD, Assembled, Found, Later, Parameter, Piece
from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.errors import CheckpointError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(folder: Path) -> Assembled:
    """``folder`` as a checkpoint without an optimizer. Raises CheckpointError for a file that is missing or damaged."""
    names = _files(folder)
    parameters = []
    for number, name in enumerate(names):
        with TensorFile(folder / name) as file:
            for held, entry in file.entries.items():
                later = Later(entry.dtype, entry.numel, partial(_read, folder / name, held))
                parameters.append(Parameter(held, entry.shape, entry.dtype, False, (Piece(number, {SHARD: later}),)))
    return Assembled(Found(folder, "save_pretrained", tuple(names), tuple(parameters)))


def _read(path: Path, name: str) -> torch.Tensor:
    with TensorFile(path) as file:
        out = torch.empty(file.entries[name].numel, dtype=file.entries[name].dtype)
        file.read_into(name, 0, out)
        return out


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [WEIGHTS]
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error}); restore it, or name another folder") from error
    if odd := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index} names files out of its folder: {', '.join(odd)}; restore it, or name another folder")
    return names
