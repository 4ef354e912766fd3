"""The whole model as files of ``torch.save``, which scripts for DeepSpeed ask for."""

from __future__ import annotations

import os
import re

import torch

from hf_zero.checkpoint import storage
from hf_zero.checkpoint.convert.export import (
    INDEX,
    WEIGHTS,
    as_saved_pretrained,
    index_of,
    split_into_files,
)
from hf_zero.checkpoint.convert.outputs import all_names, outputs
from hf_zero.checkpoint.convert.publish import Publication
from hf_zero.checkpoint.convert.targets import remove_irregular, temporary_path, torch_save
from hf_zero.checkpoint.failures import checkpoint_errors
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.storage import local_path
from hf_zero.logging import listed, logger

TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model{suffix}.bin", "pytorch_model.bin.index.json"


_OF_TORCH = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin|" + re.escape(TORCH_INDEX))


def write_torch_files(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    max_shard_size: str | int = "5GB",
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    verify: bool = True,
) -> list[str]:
    """Write the whole model in float32 into the folder ``dst`` as files of ``torch.save``, with all
    names of tied tensors, and return their names; several files have an index. Holds one file at a
    time in memory. Arguments and errors as in :func:`convert_checkpoint`.
    """
    target = local_path(dst, "a converted model")
    with (
        checkpoint_errors(target),
        open_checkpoint(find_checkpoint(src, tag), hashes=verify) as checkpoint,
    ):
        manifest = checkpoint.manifest
        tensors = outputs(manifest, torch.float32, exclude_frozen_parameters)
        parts = split_into_files(
            as_saved_pretrained(checkpoint, tensors), max_shard_size, TORCH_WEIGHTS
        )
        names = all_names(manifest)
        written = [*parts, *([TORCH_INDEX] if len(parts) > 1 else [])]
        places: dict[str, str] = {}
        remove_irregular(temporary_path(target, file) for file in written)
        try:
            for file, part in parts.items():
                state: dict[str, torch.Tensor] = {}
                for output in part:
                    values = torch.empty(output.shape, dtype=output.dtype)
                    output.fill(checkpoint, values)
                    state |= dict.fromkeys(names.get(output.name, [output.name]), values)
                places |= dict.fromkeys(state, file)
                torch_save(state, temporary_path(target, file))
            if len(parts) > 1:
                index = index_of(parts, places)
                storage.write_file(temporary_path(target, TORCH_INDEX), index)
            with Publication(target) as publication:
                # Transformers takes the file of a former conversion before the index
                for old in target.iterdir():
                    if _OF_TORCH.fullmatch(old.name) and old.name not in written:
                        publication.remove(old.name)
                for file in written:
                    publication.replace(temporary_path(target, file), file)
        finally:
            for file in written:
                temporary_path(target, file).unlink(missing_ok=True)
    # They may be the Trainer's own, so they are not removed.
    preferred = [name for name in (WEIGHTS.format(suffix=""), INDEX) if (target / name).is_file()]
    if preferred:
        logger.warning(
            "%s also holds %s, which Transformers takes before the written %s; remove it, or "
            "convert into another folder",
            target,
            listed(preferred),
            listed(written),
        )
    return list(parts)
