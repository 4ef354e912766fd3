"""The converter: selects the tensors to write, their names, and their division into files, which
``files.py`` writes; ``to_dcp.py`` and ``to_universal.py`` write the other formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

import hf_zero
from hf_zero.checkpoint import storage
from hf_zero.checkpoint.convert import card
from hf_zero.checkpoint.convert.adapters import CONFIG as ADAPTER
from hf_zero.checkpoint.convert.adapters import adapter_parts, adapters_in
from hf_zero.checkpoint.convert.files import Journal, write_part
from hf_zero.checkpoint.convert.outputs import (
    DtypeName,
    OutputTensor,
    choose,
    dtype_option,
    exported,
    log_excluded,
    outputs,
    plan_outputs,
)
from hf_zero.checkpoint.convert.publish import Publication
from hf_zero.checkpoint.convert.targets import (
    lock_folder,
    new_folder,
    refuse_link,
    refuse_target,
    temporary_path,
)
from hf_zero.checkpoint.failures import checkpoint_errors
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.manifest import dtype_name
from hf_zero.checkpoint.progress import progress_bar
from hf_zero.checkpoint.reader import Checkpoint, open_checkpoint
from hf_zero.checkpoint.storage import AnyPath, local_path
from hf_zero.checkpoint.tensorfile import FilePlan
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.logging import in_units, logger, parse_size

WEIGHTS = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
Format = Literal["safetensors", "dcp", "universal"]
SAFETENSORS: Final = "safetensors"
DCP: Final = "dcp"
UNIVERSAL: Final = "universal"
WORKERS = 2  # one reads while the other writes; each has two buffers of Scratch.ELEMENTS
SHARD_SIZE = "5GB"
_ALL = "all that training needs is written"
# arguments that a format does not take, with the reason
REFUSED = {
    SAFETENSORS: {},
    DCP: {
        "only": _ALL,
        "adapters": _ALL,
        "max_shard_size": "torch divides the files",
        "workers": "one thread writes",
    },
    UNIVERSAL: {
        "dtype": "weights are float32",
        "only": _ALL,
        "adapters": _ALL,
        "exclude_frozen_parameters": _ALL,
        "max_shard_size": "each parameter has its own files",
        "workers": "one thread writes",
    },
}


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion: ``files`` are the names of the weight files, ``carried`` the names of
    the other files, ``dtypes`` the dtypes of the parameters, the most elements first.

    ``kept`` of the ``nbytes`` had already been written by an interrupted conversion. ``source`` is
    the checkpoint that was read: a run's folder may hold several.
    """

    folder: Path
    files: tuple[str, ...]
    carried: tuple[str, ...]
    tensors: int
    parameters: int
    nbytes: int
    kept: int = 0
    source: AnyPath | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _OutputFiles:
    """Division of the tensors into files, and the small files to write beside them."""

    parts: dict[str, list[OutputTensor]]
    beside: dict[str, bytes]
    of_adapters: bool = False

    @property
    def not_carried(self) -> tuple[str, ...]:
        """Files of the base model, which adapters do not have beside them."""
        return card.OF_BASE if self.of_adapters else ()

    @property
    def chosen(self) -> list[OutputTensor]:
        return [output for part in self.parts.values() for output in part]


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: DtypeName | torch.dtype | None = None,
    max_shard_size: str | int = SHARD_SIZE,
    tag: str | None = None,
    progress: bool | None = None,
    *,
    exclude_frozen_parameters: bool = False,
    verify: bool | None = None,
    only: str | Sequence[str] | None = None,
    adapters: bool | None = None,
    workers: int = WORKERS,
    to: Format = SAFETENSORS,
    overwrite: bool = True,
) -> Conversion:
    """Write a checkpoint as a model folder that ``from_pretrained`` loads, or as a folder that
    torch.distributed.checkpoint or DeepSpeed loads. Needs neither the model's code nor, but for
    DeepSpeed, memory for the model.

    A conversion that was killed or interrupted resumes if it is called again for the same
    checkpoint with the same options; one that failed leaves the target as it was.

    Args:
        src: the folder given to ``save_checkpoint``, one checkpoint in it, or a folder of runs: of
            several checkpoints the newest complete one is used, and logged. A model folder is read
            only if it is ``src`` itself.
        dst: the folder to write, created if needed. Weights in it are replaced once the new ones
            are complete.
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default the dtype each parameter had
            when it was handed to training.
        max_shard_size: largest size of one file, such as ``"5GB"`` or a number of bytes; a larger
            tensor has its own file. Adapters have one file each: PEFT reads no sharded files.
        tag: by default the one that ``latest`` names.
        progress: whether to show a bar on stderr; by default only if stderr is a terminal.
        exclude_frozen_parameters: leave out parameters that were not trained.
        verify: compare what is read with its block hashes, while it is read (None); also hash the
            checkpoint's files first (True); or compare nothing (False).
        only: patterns for the names of tensors (``"*.embed_tokens.*"``): no others are written.
        adapters: write only the adapters of a PEFT model, in the files of its ``save_pretrained``
            (True), or the whole wrapped model (False); by default the adapters if the checkpoint
            holds any.
        workers: threads that read, cast and write; the written bytes do not depend on their number.
        to: ``"safetensors"``; or, with optimizer state and into a new folder, ``"dcp"``, under the
            names of the training model, or ``"universal"``, DeepSpeed's, whose name is written to
            ``latest_universal`` beside it.
        overwrite: whether to replace weights and other files in ``dst``, which is logged, or to
            raise CheckpointError for them.

    Raises:
        CheckpointError: a checkpoint that is missing or damaged; a folder that cannot be written,
            that another conversion is writing, that is a link, or that is, holds or is in the
            checkpoint; a disk without room; adapters that are asked for but absent; optimizer state
            that the format does not have.
        ConfigError: an invalid dtype, format, size or number of workers, an argument that the
            format does not take, or a pattern that matches no tensor.
    """
    dtype_chosen, target = dtype_option(dtype), local_path(dst, "a converted model")
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers={workers!r} convert nothing; pass 1 or more")
    options = {
        "dtype": dtype is not None,
        "only": only is not None,
        "adapters": adapters,
        "exclude_frozen_parameters": exclude_frozen_parameters,
        "max_shard_size": max_shard_size != SHARD_SIZE,
        "workers": workers != WORKERS,
    }
    _refuse(to, [name for name, chosen in options.items() if chosen])
    with (
        checkpoint_errors(target),
        open_checkpoint(find_checkpoint(src, tag), hashes=verify is not False) as checkpoint,
    ):
        refuse_target(target, checkpoint.folder)
        if to != SAFETENSORS:
            return _write_with_optimizer(
                to, checkpoint, target, dtype_chosen, exclude_frozen_parameters, verify is True
            )
        tensors = outputs(checkpoint.manifest, dtype_chosen, exclude_frozen_parameters)
        output_files = _of_adapters(checkpoint, tensors, only, adapters) or _of_model(
            checkpoint, tensors, only, max_shard_size
        )
        plans = {name: plan_outputs(part) for name, part in output_files.parts.items()}
        _make(target, output_files)
        with lock_folder(target):
            kept, carried = _write(
                checkpoint,
                target,
                output_files,
                plans,
                verify is True,
                workers,
                progress,
                overwrite,
            )
        carried += [name for name in output_files.beside if name != INDEX]
        nbytes = sum(output.nbytes for output in output_files.chosen)
        return _conversion(checkpoint, target, plans, output_files.chosen, nbytes, carried, kept)


def _conversion(
    checkpoint: Checkpoint,
    target: Path,
    files: Iterable[str],
    tensors: Sequence[OutputTensor],
    nbytes: int,
    carried: Sequence[str] = (),
    kept: int = 0,
) -> Conversion:
    """Return the result of writing ``tensors`` into ``files`` of ``target``."""
    return Conversion(
        target,
        tuple(files),
        tuple(carried),
        len(tensors),
        sum(tensor.numel for tensor in tensors if not tensor.is_buffer),
        nbytes,
        kept,
        checkpoint.folder,
        _dtypes(tensors),
    )


def _refuse(to: str, names: list[str]) -> None:
    """Raise ConfigError for an unknown format ``to`` and for arguments that it does not take."""
    if to not in REFUSED:
        raise ConfigError(
            f"to={to!r} is no format to convert to; pass {', '.join(map(repr, REFUSED))}"
        )
    refused = [f"{name} ({REFUSED[to][name]})" for name in names if name in REFUSED[to]]
    if refused:
        raise ConfigError(f"to={to!r} does not take {', '.join(refused)}; leave it out")


def _write_with_optimizer(
    to: str,
    checkpoint: Checkpoint,
    target: Path,
    dtype: torch.dtype | None,
    exclude_frozen: bool,
    verify: bool,
) -> Conversion:
    """Write the folder of another format than safetensors, with optimizer state."""
    from hf_zero.checkpoint.convert import to_dcp, to_universal  # import much of torch

    if verify:
        checkpoint.verify(checkpoint.hashed_files())
    with new_folder(target) as folder:
        if to == DCP:
            tensors = to_dcp.write_dcp(checkpoint, folder, dtype, exclude_frozen)
        else:
            tensors = to_universal.write_universal(checkpoint, folder)
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in written]
        nbytes = sum(path.stat().st_size for path in written)
    if to == UNIVERSAL:
        to_universal.name_latest(target)
    return _conversion(checkpoint, target, names, tensors, nbytes)


def _write(
    checkpoint: Checkpoint,
    target: Path,
    output_files: _OutputFiles,
    plans: dict[str, FilePlan],
    verify: bool,
    workers: int,
    progress: bool | None,
    overwrite: bool,
) -> tuple[int, list[str]]:
    """Fill and publish ``target``. Returns the number of bytes kept from an interrupted conversion,
    and the names of the files carried along.
    """
    beside = card.companions(checkpoint.folder)  # refuses pipes before anything is written
    total = sum(output.nbytes for output in output_files.chosen)
    journal = Journal(target, _identity(checkpoint, plans), [*plans, *output_files.beside])
    try:
        if not journal.resumes:
            _replace_or_refuse(checkpoint, output_files, target, overwrite)
        kept = sum(max(0, journal.written(name) - len(plan.header)) for name, plan in plans.items())
        _check_disk_space(target, list(plans), total)
        if kept:
            logger.info(
                "%s: going on with a conversion that was interrupted after %s of %s",
                target,
                in_units(kept),
                in_units(total),
            )
        with progress_bar(
            progress,
            total + (sum(entry.size for entry in checkpoint.hashed_files()) if verify else 0),
            f"writing {target}",
        ) as tick:
            if verify:
                checkpoint.verify(checkpoint.hashed_files(), tick)
            for name, part in output_files.parts.items():
                named = {output.name: output for output in part}
                write_part(checkpoint, target, name, plans[name], named, journal, workers, tick)
        dtypes = _dtypes(o for o in output_files.chosen if o.dtype.is_floating_point and not o.raw)
        with Publication(target) as publication:
            carried = card.carry(
                checkpoint.folder,
                beside,
                checkpoint.manifest,
                publication.new,
                dtypes[0] if dtypes else None,
                output_files.not_carried,
            )
            _publish(output_files, target, publication)
    except Exception:
        journal.clear()
        raise
    journal.clear()
    return kept, carried


def _of_adapters(
    checkpoint: Checkpoint,
    tensors: list[OutputTensor],
    only: str | Sequence[str] | None,
    choice: bool | None,
) -> _OutputFiles | None:
    """Return the files of PEFT's adapters, or None if the model is to be written."""
    if choice is False:
        return None
    by_name = {output.held: output for output in tensors}
    adapters = adapters_in(checkpoint.manifest, checkpoint.folder, by_name, needed=choice is True)
    if not adapters:
        return None
    parts, configs = adapter_parts(adapters, by_name, checkpoint.folder)
    if only is not None:
        remedy = (
            "; these are only the adapters: for the rest of the model pass adapters=False (--whole)"
        )
        chosen = {
            id(output)
            for output in choose(
                [output for part in parts.values() for output in part], only, remedy
            )
        }
        parts = {
            name: [output for output in part if id(output) in chosen]
            for name, part in parts.items()
        }
        parts = {name: part for name, part in parts.items() if part}
        configs = {
            name: content
            for name, content in configs.items()
            if any(Path(part).parent == Path(name).parent for part in parts)
        }
    return _OutputFiles(parts, configs, of_adapters=True)


def _of_model(
    checkpoint: Checkpoint,
    model_tensors: list[OutputTensor],
    only: str | Sequence[str] | None,
    max_shard_size: str | int,
) -> _OutputFiles:
    parts = split_into_files(
        choose(as_saved_pretrained(checkpoint, model_tensors), only), max_shard_size
    )
    if len(parts) == 1:
        return _OutputFiles(parts, {})
    places = {output.name: file for file, part in parts.items() for output in part}
    return _OutputFiles(parts, {INDEX: index_of(parts, places)})


def as_saved_pretrained(checkpoint: Checkpoint, tensors: list[OutputTensor]) -> list[OutputTensor]:
    """Return those of ``tensors`` that ``save_pretrained`` would write, under its names."""
    log_excluded(checkpoint)
    return exported(tensors, checkpoint.manifest.export)


def _identity(checkpoint: Checkpoint, plans: dict[str, FilePlan]) -> str:
    """Return a digest that is equal for conversions that write the same bytes."""
    digest = hashlib.sha256(
        f"{hf_zero.__version__} {torch.__version__} {checkpoint.identity()}\n".encode()
    )
    for name, plan in plans.items():
        digest.update(f"{name} {hashlib.sha256(plan.header).hexdigest()}\n".encode())
    return digest.hexdigest()


def split_into_files(
    chosen: list[OutputTensor], max_shard_size: str | int, pattern: str = WEIGHTS
) -> dict[str, list[OutputTensor]]:
    """Divide the tensors into files by the rule of ``save_pretrained``.

    Raises ConfigError for an invalid ``max_shard_size``.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {output.name: output for output in chosen}
    try:
        size = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        is_size = size > 0
    except (ConfigError, TypeError):
        is_size = False
    if not is_size:
        raise ConfigError(
            f"max_shard_size {max_shard_size!r} is not a size above 0; pass a number of bytes or a "
            "string such as '5GB'"
        )
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda output: output.nbytes,
        filename_pattern=pattern,
        max_shard_size=size,
    )
    files = {
        file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()
    }
    return files or {pattern.format(suffix=""): []}


def index_of(parts: dict[str, list[OutputTensor]], places: dict[str, str]) -> bytes:
    """Return the index of several weight files; ``places`` are the files by name of a tensor."""
    sizes = [output for part in parts.values() for output in part]
    metadata = {
        "total_parameters": sum(o.numel for o in sizes),
        "total_size": sum(o.nbytes for o in sizes),
    }
    index = {"metadata": metadata, "weight_map": places}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _make(target: Path, output_files: _OutputFiles) -> None:
    if target.suffix in (".bin", ".pt", ".safetensors") or target.is_file():
        raise CheckpointError(
            f"{target} names a file; pass a folder, the weights are written into it "
            "as model.safetensors"
        )
    if not output_files.of_adapters and (target / ADAPTER).is_file():
        raise CheckpointError(
            f"{target / ADAPTER} would make from_pretrained load an adapter in place of the model "
            "that is written; remove it, or choose another folder"
        )
    for folder in {(target / name).parent for name in output_files.parts}:
        refuse_link(folder)
        folder.mkdir(parents=True, exist_ok=True)


def _replaced(output_files: _OutputFiles, target: Path) -> list[Path]:
    """Return the existing files in ``target`` that this conversion removes or replaces."""
    old = [target / name for name in (*output_files.parts, *output_files.beside)]
    if not output_files.of_adapters and target.is_dir():
        old += [
            target / INDEX,
            *(
                path
                for path in target.iterdir()
                if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name)
            ),
        ]
    return [path for path in old if os.path.lexists(path)]


def _replace_or_refuse(
    checkpoint: Checkpoint, output_files: _OutputFiles, target: Path, overwrite: bool
) -> None:
    """Log the files of ``target`` that the conversion replaces. Raises CheckpointError for them
    without ``overwrite``.
    """
    carried = set(card.companions(checkpoint.folder)) - {*output_files.not_carried}
    beside = [target / name for name in sorted(carried)]
    lost = [*_replaced(output_files, target), *(path for path in beside if os.path.lexists(path))]
    names = ", ".join(sorted({str(path.relative_to(target)) for path in lost}))
    if lost and not overwrite:
        raise CheckpointError(
            f"{target} holds {names}, which would be replaced; pass --overwrite (overwrite=True), "
            "or name another folder"
        )
    if lost:
        logger.info("%s: %s replaced; another folder keeps them", target, names)


def _check_disk_space(target: Path, names: list[str], total: int) -> None:
    sizes = [
        path.stat().st_blocks * 512
        for path in (temporary_path(target, name) for name in names)
        if path.is_file()
    ]
    free = shutil.disk_usage(target).free + sum(sizes)
    if free < total:
        raise CheckpointError(
            f"{target} has room for {free:,} bytes, the model needs {total:,}; free space or "
            "choose another folder"
        )


def _dtypes(written: Iterable[OutputTensor]) -> tuple[str, ...]:
    """Return the dtypes of the parameters, the most elements first."""
    sizes: Counter[torch.dtype] = Counter()
    for output in written:
        if not output.is_buffer:
            sizes[output.dtype] += output.numel
    return tuple(dtype_name(dtype) for dtype, _ in sizes.most_common())


def _publish(output_files: _OutputFiles, target: Path, publication: Publication) -> None:
    """Rename the complete files into place. The index, which makes several files a model, is
    removed first and renamed last.
    """
    for name, content in output_files.beside.items():
        storage.write_file(temporary_path(target, name), content)
    if not output_files.of_adapters:
        publication.remove(INDEX)
        for old in _replaced(output_files, target):
            if old.name not in (*output_files.parts, *output_files.beside):
                publication.remove(old.name)
    publication.replace_all()
    for name in (*output_files.parts, *output_files.beside):
        publication.replace(temporary_path(target, name), name)
    for folder in {(target / name).parent for name in output_files.parts} | {target}:
        storage.fsync_path(folder)
