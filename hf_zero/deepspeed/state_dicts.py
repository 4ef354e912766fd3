"""State dicts under DeepSpeed's names: copies for saving, and whole weights out of a sharded
checkpoint.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.reader import Checkpoint


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Copies of the tensors in ``item`` (nested dicts, lists, tuples) on ``device``.

    Saving a view of a large buffer would write the buffer. What shared memory shares it again in
    the copy: tied weights stay tied, and are written once.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, copies: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        place = (
            item.untyped_storage().data_ptr(),
            item.storage_offset(),
            item.shape,
            item.stride(),
            item.dtype,
            item.device,
        )
        if place not in copies or not item.numel():
            copies[place] = item.detach().to(device, copy=True)
        return copies[place]
    if isinstance(item, Mapping):
        kind: Any = type(item)
        return kind((key, _clone(value, device, copies)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(_clone(value, device, copies) for value in item)
    return item


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> BinaryIO | str:
    """What ``torch.load`` reads the client state and the counters from, for code that adds them to
    a consolidated state dict.

    A checkpoint of hf-zero holds them in its manifest; this is a file in memory. Of a folder that
    DeepSpeed wrote it is the path of the file.
    """
    if files := _files(checkpoint_dir, "model_states.pt"):
        return files[0]
    with Checkpoint(find_checkpoint(checkpoint_dir)) as checkpoint:
        manifest = checkpoint.manifest
        counters = {name: manifest.counters[name] for name in ("global_steps", "skipped_steps")}
        return _in_memory(
            {**checkpoint.client_state(), **counters, "dp_world_size": manifest.world["size"]}
        )


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[BinaryIO] | list[str]:
    """One file in memory for each rank that saved, from which ``torch.load`` reads the ZeRO
    stage; of a folder that DeepSpeed wrote the paths of its files.
    """
    if files := _files(checkpoint_dir, "optim_states.pt"):
        return files
    with Checkpoint(find_checkpoint(checkpoint_dir)) as checkpoint:
        manifest = checkpoint.manifest
        state = {"zero_stage": manifest.stage, "partition_count": manifest.world["shard"]}
        return [_in_memory({"optimizer_state_dict": state}) for _ in manifest.files]


def _files(folder: str | os.PathLike[str], ending: str) -> list[str]:
    """The files of ``folder`` that end so, in the order of the numbers in their names."""
    found = Path(folder).glob(f"*_{ending}")
    return sorted(map(str, found), key=lambda name: [*map(int, re.findall(r"\d+", name))])


def _in_memory(content: dict[str, Any]) -> BinaryIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file
