"""State dicts under DeepSpeed's names: copies for saving, and whole weights from a sharded
checkpoint, as a dict or as a pickle (``convert_zero_checkpoint_to_fp32_state_dict``, which all
ranks may call at once).
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from hf_zero.checkpoint import convert_zero_checkpoint_to_fp32_state_dict as _convert
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.manifest import strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint, open_checkpoint


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Return ``item`` (nested dicts, lists, tuples) with copies of its tensors on ``device``.

    Saving a view of a large buffer would write the buffer. Tensors with the same memory share one
    copy: tied weights stay tied, and are written once.
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
    """Return a file from which ``torch.load`` reads the client state and the counters, for code
    that adds them to a consolidated state dict.

    An hf-zero checkpoint has them in its manifest; this is a file in memory. For a folder that
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
    """Return one file in memory for each rank that saved, from which ``torch.load`` reads the ZeRO
    stage; for a folder that DeepSpeed wrote the paths of its files.
    """
    if files := _files(checkpoint_dir, "optim_states.pt"):
        return files
    with Checkpoint(find_checkpoint(checkpoint_dir)) as checkpoint:
        manifest = checkpoint.manifest
        state = {"zero_stage": manifest.stage, "partition_count": manifest.world["shard"]}
        return [_in_memory({"optimizer_state_dict": state}) for _ in manifest.files]


def _files(folder: str | os.PathLike[str], ending: str) -> list[str]:
    """Return the files of ``folder`` with this ending, ordered by the numbers in their names."""
    found = Path(folder).glob(f"*_{ending}")
    return sorted(map(str, found), key=lambda name: [*map(int, re.findall(r"\d+", name))])


def _in_memory(content: dict[str, Any]) -> BinaryIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


# ---- Files of whole weights ----

INDEX = "model.safetensors.index.json"


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    verify: bool = True,
) -> None:
    """Write the whole model in fp32 to ``output_dir``: ``pytorch_model.bin``, or with
    ``safe_serialization`` ``model.safetensors``; several files and an index beyond
    ``max_shard_size`` (None: never). ``verify`` checks the hashes of the blocks that are read.

    Of several processes that call it at once one writes, and the others return when it has.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with _one_writer(folder) as writes:
        if not writes:
            return
        size = 1 << 60 if max_shard_size is None else max_shard_size
        if safe_serialization:
            _convert(checkpoint_dir, folder, size, True, tag, exclude_frozen_parameters, verify)
            return
        between = folder / f".fp32.{os.getpid()}"
        try:
            _convert(checkpoint_dir, between, size, True, tag, exclude_frozen_parameters, verify)
            _as_pickles(between, folder, _tied(checkpoint_dir, tag))
        finally:
            shutil.rmtree(between, ignore_errors=True)


@contextmanager
def _one_writer(folder: Path) -> Iterator[bool]:
    """Yield whether this process is the one that writes into ``folder``; the others enter when it
    is done.
    """
    path = folder / ".fp32.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not path.exists():  # the writer before has deleted it, as it was done
                yield False
                return
        yield True
        os.unlink(path)  # waiting processes hold it open
    finally:
        os.close(descriptor)


def _tied(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> list[set[str]]:
    """Return the names of each tensor that has several."""
    groups: dict[str, set[str]] = {}
    with open_checkpoint(find_checkpoint(checkpoint_dir, tag)) as checkpoint:
        for tied, held in checkpoint.manifest.aliases.items():
            groups.setdefault(held, {strip_wrappers(held)}).add(strip_wrappers(tied))
    return list(groups.values())


def _as_pickles(source: Path, folder: Path, tied: list[set[str]]) -> None:
    """Write the safetensors files of ``source``, one after another, as files of torch.save, with
    all names of a tensor: a pickle holds it once.
    """

    def with_all_names(given: dict[str, Any]) -> dict[str, Any]:
        """Return ``given`` with all names of a tied tensor, of which it has one."""
        there = ((group, next((name for name in group if name in given), None)) for group in tied)
        more = {name: given[held] for group, held in there if held is not None for name in group}
        return given | more

    for file in sorted(source.glob("*.safetensors")):
        name = _pickle_name(file.name)
        torch.save(with_all_names(load_file(file)), folder / f".{name}")
        os.replace(folder / f".{name}", folder / name)
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        places = with_all_names(index["weight_map"]).items()
        index["weight_map"] = {key: _pickle_name(name) for key, name in places}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))


def _pickle_name(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
