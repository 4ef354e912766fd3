"""DeepSpeed's functions and command line that read checkpoints or prepare state dicts for files:
``clone_tensors_for_torch_save``, ``zero_to_fp32``, which all ranks may call at once, and
``ds_to_universal``.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from hf_zero import checkpoint
from hf_zero.checkpoint.convert.export import UNIVERSAL, convert_checkpoint
from hf_zero.checkpoint.convert.targets import lock_if_supported, refuse_target
from hf_zero.checkpoint.convert.torch_weights import write_torch_files
from hf_zero.checkpoint.file_lock import FileLock
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.reader import ShardedCheckpoint
from hf_zero.zero.layout.tree import map_tensors


def clone_tensors_for_torch_save(item: object, device: str | torch.device = "cpu") -> object:
    """Return ``item`` (nested dicts, lists, tuples, dataclasses) with copies of its tensors on
    ``device``.

    Saving a view of a large buffer would write the buffer. Tensors with the same memory share one
    copy: tied weights stay tied, and are written once.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:  # no view of a buffer
            return tensor.detach().to(device, copy=True)
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.detach().to(device, copy=True)
        return copies[memory]

    return map_tensors(item, copied)


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> BinaryIO | str:
    """Return a file from which ``torch.load`` reads the client state and the counters, for code
    that adds them to a consolidated state dict.

    An hf-zero checkpoint has them in its manifest; this is a file in memory. For a folder that
    DeepSpeed wrote it is the path of the file.
    """
    if files := _files(checkpoint_dir, "model_states.pt"):
        return files[0]
    with ShardedCheckpoint(find_checkpoint(checkpoint_dir)) as opened:
        manifest = opened.manifest
        counters = {name: manifest.counters[name] for name in ("global_steps", "skipped_steps")}
        return _in_memory(
            {**opened.client_state(), **counters, "dp_world_size": manifest.world["size"]}
        )


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[BinaryIO] | list[str]:
    """Return one file in memory for each rank that saved, from which ``torch.load`` reads the ZeRO
    stage; for a folder that DeepSpeed wrote the paths of its files.
    """
    if files := _files(checkpoint_dir, "optim_states.pt"):
        return files
    with ShardedCheckpoint(find_checkpoint(checkpoint_dir)) as opened:
        manifest = opened.manifest
        state = {"zero_stage": manifest.stage, "partition_count": manifest.world["shard"]}
        return [_in_memory({"optimizer_state_dict": state}) for _ in manifest.files]


def _files(folder: str | os.PathLike[str], ending: str) -> list[str]:
    """Return the files of ``folder`` with this ending, ordered by the numbers in their names."""
    files = Path(folder).glob(f"*_{ending}")
    return sorted(map(str, files), key=lambda name: [*map(int, re.findall(r"\d+", name))])


def _in_memory(content: dict[str, object]) -> BinaryIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


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

    Of several processes that call it at once one writes, and the others return when it has. On a
    file system without locks each of them writes, as a warning says.
    """
    folder = Path(output_dir)
    # scripts for DeepSpeed name the folder of `latest` as both
    refuse_target(folder, find_checkpoint(checkpoint_dir, tag), may_hold=not safe_serialization)
    folder.mkdir(parents=True, exist_ok=True)
    with _one_writer(folder) as writes:
        if not writes:
            return
        size = 1 << 60 if max_shard_size is None else max_shard_size
        if safe_serialization:
            checkpoint.convert_zero_checkpoint_to_fp32_state_dict(
                checkpoint_dir, folder, size, True, tag, exclude_frozen_parameters, verify
            )
        else:
            write_torch_files(checkpoint_dir, folder, size, tag, exclude_frozen_parameters, verify)


@contextmanager
def _one_writer(folder: Path) -> Iterator[bool]:
    """Yield whether this process is the one that writes into ``folder``; the others enter when it
    is done.
    """
    lock = lock_if_supported(lambda: FileLock(folder / ".fp32.lock", fcntl.LOCK_EX, seconds=None))
    if lock is None:
        yield True
        return
    try:
        writes = lock.is_current()  # else the writer before has removed it, as it was done
        yield writes
        if writes:
            lock.remove()
    finally:
        lock.close()


def parse_arguments(args: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of ``python -m deepspeed.checkpoint.ds_to_universal``."""
    parser = argparse.ArgumentParser(
        description="Write a checkpoint of hf-zero or DeepSpeed as a universal folder of DeepSpeed."
    )
    parser.add_argument("--input_folder", required=True, help="a checkpoint: the folder of a tag")
    parser.add_argument("--output_folder", required=True, help="the universal folder to write")
    without = "accepted without effect: tensors are read and written one by one"
    parser.add_argument("--num_extract_workers", type=int, default=4, help=without)
    parser.add_argument("--num_merge_workers", type=int, default=2, help=without)
    for flag in ("--keep_temp_folder", "--inject_missing_state"):
        parser.add_argument(flag, action="store_true", help=without)
    trusts = "do not compare what is read with the hashes in the manifest"
    parser.add_argument("--no_verify", action="store_true", help=trusts)
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=without)
    return parser.parse_args(args)


def main(args: argparse.Namespace | None = None) -> None:
    """Write the checkpoint in ``args.input_folder`` to ``args.output_folder`` in DeepSpeed's
    universal format.
    """
    args = parse_arguments() if args is None else args
    # a namespace made for DeepSpeed has no no_verify
    verify = False if getattr(args, "no_verify", False) else None
    convert_checkpoint(args.input_folder, args.output_folder, to=UNIVERSAL, verify=verify)
