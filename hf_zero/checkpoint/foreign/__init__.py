"""Checkpoints of other programs, read in place: each gets a manifest in memory, and its ranges are
read as those of our own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.checkpoint.storage import AnyPath, is_remote

# What a folder of each kind holds -> the module that opens it.
SIGNS = {
    "*mp_rank_*_model_states.pt": "deepspeed",
    ".metadata": "dcp",
    "pytorch_model_fsdp*/.metadata": "dcp",
    "model.safetensors": "huggingface",
    "model.safetensors.index.json": "huggingface",
}


def recognise(folder: AnyPath) -> str:
    """The module of this package that reads ``folder``, or "" if none does: for a run's folder,
    with ``latest``, too.

    In an object store only checkpoints of ours are read.
    """
    if is_remote(folder) or (folder / "latest").is_file():
        return ""
    return next(
        (module for sign, module in SIGNS.items() if next(folder.glob(sign), None) is not None), ""
    )


def open_foreign(folder: AnyPath, asked: Sequence[Sequence[str]] = ()) -> Checkpoint:
    """``folder``, which :func:`recognise` knows, as a checkpoint. Raises CheckpointError if it is
    damaged or of a kind that is not read.

    ``asked`` are the trained parameters of the model that loads, by optimizer group, for writers
    that keep no names.
    """
    module = importlib.import_module(f"{__name__}.{recognise(folder)}")
    opened: Checkpoint = module.open_checkpoint(folder, asked)
    return opened


def open_checkpoint(
    folder: AnyPath,
    grouped: Callable[[], Sequence[Sequence[str]]] = tuple,
    hashes: bool = True,
) -> Checkpoint:
    """The checkpoint in ``folder``, ours or of a kind that ``foreign`` reads, which may ask how an
    optimizer groups names. ``hashes``: compare what is read of ours with the hashes of its blocks.

    Raises CheckpointError.
    """
    if not (folder / MANIFEST_NAME).is_file() and recognise(folder):
        return open_foreign(folder, grouped())
    return Checkpoint(folder, hashes=hashes)
