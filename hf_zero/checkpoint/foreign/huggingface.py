"""Model folders of ``save_pretrained``: safetensors, one file or several with an index.

Holds weights alone, under the names in the files.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hf_zero.checkpoint.foreign.assembled import (
    Assembled,
    FolderContents,
    ModelGroups,
    Parameter,
    ParameterPart,
    Ranged,
)
from hf_zero.checkpoint.manifest import SHARD
from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.errors import CheckpointError
from hf_zero.logging import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(folder: Path, model_groups: ModelGroups = ()) -> Assembled:
    """Open ``folder`` as a checkpoint without an optimizer.

    Raises CheckpointError for a file that is missing or damaged.
    """
    names = files_of(folder)
    parameters, opened = [], []
    try:
        for number, name in enumerate(names):
            opened.append(file := TensorFile(folder / name))
            for key, entry in file.entries.items():
                values = Ranged(entry.dtype, entry.numel, partial(file.read_into, key))
                parameters.append(
                    Parameter(
                        key,
                        entry.shape,
                        entry.dtype,
                        False,
                        (ParameterPart(number, {SHARD: values}),),
                    )
                )
        return Assembled(
            FolderContents(
                folder, "save_pretrained", tuple(names), tuple(parameters), opened=tuple(opened)
            )
        )
    except BaseException:
        for file in opened:
            file.close()
        raise


def files_of(folder: Path) -> dict[str, set[str]]:
    """Return the weight files, each with the tensors that the index promises in it (none without an
    index). Raises CheckpointError for a damaged index.
    """
    index = folder / INDEX
    if not index.is_file():
        return {WEIGHTS: set()}
    promised: dict[str, set[str]] = {}
    try:
        for tensor, name in parse_json(index.read_bytes())["weight_map"].items():
            promised.setdefault(str(name), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is damaged ({error}); restore it, or name another folder"
        ) from error
    if not promised:
        raise CheckpointError(f"{index} names no file; restore it, or name another folder")
    if odd := sorted(name for name in promised if Path(name).name != name):
        raise CheckpointError(
            f"{index} names files out of its folder: {', '.join(odd)}; restore it, "
            "or name another folder"
        )
    return dict(sorted(promised.items()))
