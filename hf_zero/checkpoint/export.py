"""The converter: slices of the chunks, cast and put at offsets known beforehand. Memory does not grow with the model."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_zero.checkpoint import card, folders
from hf_zero.checkpoint.bar import Tick, bar
from hf_zero.checkpoint.manifest import Manifest, dtype_name
from hf_zero.checkpoint.opened import Checkpoint, open_checkpoint
from hf_zero.checkpoint.outputs import Output, Scratch, dtype_option, outputs, read_cast
from hf_zero.checkpoint.tensorfile import Plan, bytes_view, plan_file, write_all
from hf_zero.checkpoint.together import told
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.logs import logger

WEIGHTS = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
WORKERS = 2  # one reads while the other writes; each holds two buffers of Scratch.ELEMENTS


@dataclass(frozen=True)
class Conversion:
    """What was written: ``files`` are the names of the weight files, ``carried`` those of the others."""

    folder: Path
    files: tuple[str, ...]
    carried: tuple[str, ...]
    tensors: int
    parameters: int
    nbytes: int


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    tag: str | None = None,
    progress: bool | None = None,
    *,
    exclude_frozen_parameters: bool = False,
    verify: bool = False,
) -> Conversion:
    """Write a checkpoint as a model folder that ``from_pretrained`` loads. Needs neither the model's code nor its memory.

    Args:
        src: the folder given to ``save_checkpoint``, one checkpoint in it, a Trainer's ``checkpoint-N`` or output folder.
        dst: the folder to write; made if needed. Weights in it are replaced once the new ones are whole.
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default the dtype each parameter had when it was handed to
            training.
        max_shard_size: largest size of one file, such as ``"5GB"`` or a number of bytes; a larger tensor has its own.
        tag: by default the one that ``latest`` names.
        progress: a bar on stderr; by default only where stderr is a terminal.
        exclude_frozen_parameters: leave out parameters that were not trained.
        verify: compute the hashes of the checkpoint's files first.

    Raises:
        CheckpointError: a checkpoint that is missing or damaged, a folder that cannot be written, a disk without room.
        ConfigError: a dtype or a size that makes no sense.
    """
    wanted, target = dtype_option(dtype), Path(dst)
    with open_checkpoint(folders.find(src, tag)) as checkpoint:
        manifest = checkpoint.manifest
        chosen = _exported(manifest, outputs(manifest, wanted, exclude_frozen_parameters))
        parts = _split(chosen, max_shard_size)
        total = sum(output.nbytes for output in chosen)
        if manifest.excluded:
            logger.warning("%s was saved without its frozen parameters: the converted folder lacks them", checkpoint.folder)
        try:
            _prepare(target, total)
            with bar(progress, total + (sum(entry.size for entry in checkpoint.listed()) if verify else 0), f"writing {target}") as tick:
                if verify:
                    checkpoint.verify(checkpoint.listed(), tick)
                _write_weights(checkpoint, parts, target, tick)
            carried = card.carry(checkpoint.folder, manifest, target, _dominant(chosen))
            _publish(parts, target)
        except OSError as error:
            raise CheckpointError(told(error, target)) from error
        finally:
            for name in (*parts, INDEX):
                _temporary(target, name).unlink(missing_ok=True)
    parameters = sum(output.numel for output in chosen if not output.is_buffer)
    return Conversion(target, tuple(parts), tuple(carried), len(chosen), parameters, total)


def _exported(manifest: Manifest, held: list[Output]) -> list[Output]:
    """Under the names, and without the ones, that ``save_pretrained`` would use."""
    skip, names = set(manifest.export.skip), manifest.export.names
    renamed = [replace(output, name=names.get(output.held, output.name)) for output in held]
    return [output for output in renamed if output.name not in skip]


def _split(chosen: list[Output], max_shard_size: str | int) -> dict[str, list[Output]]:
    """Which tensors go into which file, by the same rule as ``save_pretrained``."""
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {output.name: output for output in chosen}
    try:
        if isinstance(max_shard_size, int) and max_shard_size <= 0:
            raise ValueError("not positive")
        split = split_state_dict_into_shards_factory(
            by_name, get_storage_size=lambda output: output.nbytes, filename_pattern=WEIGHTS, max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ConfigError(
            f"max_shard_size {max_shard_size!r} is no size ({error}); pass a number of bytes or a string such as '5GB'"
        ) from error
    files = {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}
    return files or {WEIGHTS.format(suffix=""): []}


def _prepare(target: Path, total: int) -> None:
    if target.suffix in (".bin", ".pt", ".safetensors") or target.is_file():
        raise CheckpointError(f"{target} names a file; pass a folder, the weights are written into it as model.safetensors")
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if free < total:
        raise CheckpointError(f"{target} has room for {free:,} bytes, the model needs {total:,}; free space or choose another folder")


def _temporary(target: Path, name: str) -> Path:
    return target / f"{folders.NEW}{name}"


def _write_weights(checkpoint: Checkpoint, parts: dict[str, list[Output]], target: Path, tick: Tick) -> None:
    for name, part in parts.items():
        plan = plan_file([(output.name, output.dtype, output.shape) for output in part], {"format": "pt"})
        fd = os.open(_temporary(target, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.ftruncate(fd, plan.size)
            write_all(fd, memoryview(plan.header), 0)
            _copy(checkpoint, fd, plan, {output.name: output for output in part}, tick)
            os.fsync(fd)
        finally:
            os.close(fd)


def _slices(plan: Plan, part: dict[str, Output]) -> Iterator[tuple[Output, int, int, int]]:
    """(tensor, first element, last element + 1, place in the file), in the order of the file."""
    for entry in plan.entries:
        for start in range(0, entry.numel, Scratch.ELEMENTS):
            yield (
                part[entry.name],
                start,
                min(entry.numel, start + Scratch.ELEMENTS),
                len(plan.header) + entry.begin + start * entry.dtype.itemsize,
            )


def _copy(checkpoint: Checkpoint, fd: int, plan: Plan, part: dict[str, Output], tick: Tick) -> None:
    """Fill the data of one file. The workers take slices from one iterator, so that nothing queues up."""
    slices, lock, failed = _slices(plan, part), threading.Lock(), threading.Event()

    def work() -> None:
        scratch = Scratch()
        while not failed.is_set():
            with lock:
                job = next(slices, None)
            if job is None:
                return
            output, start, stop, place = job
            block, at = scratch.get("write", output.dtype, stop - start), 0
            try:
                for source in output.sources(checkpoint, start, stop):
                    read_cast(source, block[at : at + source.length], scratch)
                    at += source.length
                write_all(fd, bytes_view(block), place)
            except BaseException:
                failed.set()
                raise
            tick(block.nbytes)

    with ThreadPoolExecutor(WORKERS) as pool:
        for worker in [pool.submit(work) for _ in range(WORKERS)]:
            worker.result()


def _dominant(chosen: list[Output]) -> str | None:
    """The dtype most of the floating-point parameters are in."""
    sizes: dict[torch.dtype, int] = {}
    for output in chosen:
        if output.dtype.is_floating_point and not output.is_buffer and not output.raw:
            sizes[output.dtype] = sizes.get(output.dtype, 0) + output.numel
    return dtype_name(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else None


def _publish(parts: dict[str, list[Output]], target: Path) -> None:
    """Rename what is whole; the index, without which several files are no model, goes first and comes last."""
    index = None
    if len(parts) > 1:
        sizes = [output for part in parts.values() for output in part]
        metadata = {"total_parameters": sum(o.numel for o in sizes), "total_size": sum(o.nbytes for o in sizes)}
        places = {output.name: file for file, part in parts.items() for output in part}
        index = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        folders.write_file(_temporary(target, INDEX), index.encode())
    (target / INDEX).unlink(missing_ok=True)
    for old in list(target.iterdir()):
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name) and old.name not in parts:
            old.unlink()
    for name in parts:
        os.replace(_temporary(target, name), target / name)
    if index is not None:
        os.replace(_temporary(target, INDEX), target / INDEX)
    folders.fsync_folder(target)
