"""Checkpoints of other programs, read in place: each gets a manifest in memory, and is then read
like a checkpoint of hf-zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.checkpoint.storage import AnyPath, is_remote

# Glob pattern that identifies a kind of folder -> the module that opens it.
SIGNS = {
    "*mp_rank_*_model_states.pt": "deepspeed",
    ".metadata": "dcp",
    "pytorch_model_fsdp*/.metadata": "dcp",
    "model.safetensors": "huggingface",
    "model.safetensors.index.json": "huggingface",
}


def recognise(folder: AnyPath) -> str:
    """Return the module of this package that reads ``folder``, or "" if none does. A run's folder,
    which has a ``latest`` file, gives "" too.

    In an object store only checkpoints of hf-zero can be read.
    """
    if is_remote(folder) or (folder / "latest").is_file():
        return ""
    return next(
        (module for sign, module in SIGNS.items() if next(folder.glob(sign), None) is not None), ""
    )


def open_foreign(folder: AnyPath, asked: Sequence[Sequence[str]] = ()) -> Checkpoint:
    """Open ``folder``, which :func:`recognise` knows, as a checkpoint. Raises CheckpointError if it
    is damaged or of an unsupported kind.

    ``asked`` gives the trained parameters of the model that loads, by optimizer group, for programs
    that store no names.
    """
    module = importlib.import_module(f"{__name__}.{recognise(folder)}")
    opened: Checkpoint = module.open_checkpoint(folder, asked)
    return opened


def open_checkpoint(
    folder: AnyPath,
    grouped: Callable[[], Sequence[Sequence[str]]] = tuple,
    hashes: bool = True,
) -> Checkpoint:
    """Open the checkpoint in ``folder``, written by hf-zero or a program that ``foreign`` supports.
    ``grouped`` returns the parameter names in each optimizer group of the engine that loads.
    ``hashes`` compares what is read with the block hashes, which only hf-zero's checkpoints have.

    Raises CheckpointError.
    """
    if not (folder / MANIFEST_NAME).is_file() and recognise(folder):
        return open_foreign(folder, grouped())
    return Checkpoint(folder, hashes=hashes)
