"""The place in the training data, as a checkpoint holds it (FORMAT.md, `loader`): for a loader that
counts samples of all ranks, a field of the manifest; for a loader with a state of its own, bytes in
each rank's file.
"""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.checkpoint.manifest import LOADER, Manifest
from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, log_rank0

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


def place_of(engine: TrainingEngine) -> dict[str, int]:
    """Return the place of the engine's loader, equal on all ranks; {} without one."""
    place: dict[str, int] | None = getattr(engine.training_dataloader, "place", None)
    return dict(place) if place is not None else {}


def own_state(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return the state of a loader with a ``state_dict`` of its own, as bytes by the name of their
    tensor; {} for any other. Raises CheckpointError for a state that needs a pickle.
    """
    loader = engine.training_dataloader
    if not callable(getattr(type(loader), "state_dict", None)):
        return {}
    buffer = io.BytesIO()
    try:
        torch.save(loader.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise CheckpointError(
            f"the state of the loader ({type(loader).__name__}) cannot be saved without a pickle "
            f"that runs code when it is loaded ({error}); its state_dict() may hold numbers, "
            "strings, tensors, lists and dicts"
        ) from error
    return {LOADER: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}


def restore(engine: TrainingEngine, manifest: Manifest, file: TensorFile | None) -> None:
    """Put the engine's loader at the saved place; log why if it begins anew. ``file``: that of this
    rank, if as many ranks have saved.
    """
    loader: Any = engine.training_dataloader
    if hasattr(loader, "place") and manifest.loader:
        loader.continue_from(manifest.loader)
        _tell_of_other_samples(loader, manifest)
        return
    stateful = callable(getattr(type(loader), "load_state_dict", None))
    if stateful and file is not None and LOADER in file.entries:
        content = torch.empty(file.entries[LOADER].numel, dtype=torch.uint8)
        file.read_into(LOADER, 0, content)
        loader.load_state_dict(torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True))
        return
    if loader is None:
        why = "initialize was given no training_data"
    elif file is None and not hasattr(loader, "place"):
        why = (
            f"{type(loader).__name__} has a state for each of the {manifest.world['size']} ranks "
            f"that saved, and there are {engine.mesh.dims.world} now (a map-style dataset "
            "continues on any number)"
        )
    else:
        why = "the checkpoint does not hold it"
    done = counted(manifest.counters.get("global_steps", 0), "step")
    if manifest.batch:
        done += f" of {counted(manifest.batch['samples'], 'sample')}"
    log_rank0(
        f"the place in the training data is not restored: {why}; skip in the script what it has "
        f"trained on ({done})",
        logging.WARNING,
    )


def _tell_of_other_samples(loader: Any, manifest: Manifest) -> None:
    """Log that the steps from the end of the epoch on have other samples than on the ranks that
    saved: an epoch that is no multiple of a step is filled up, and micro-batches cut, by ranks.
    """
    before, step = manifest.batch.get("readers"), manifest.batch.get("samples", 1)
    rows = len(loader.dataset)
    if before not in (None, loader.ranks) and rows % step:
        log_rank0(
            f"{loader.ranks} data-parallel ranks resume what {before} have saved, and the {rows:,} "
            f"samples of an epoch are no multiple of the {step:,} of a step: up to the end of this "
            f"epoch steps have the samples that they would have had, from its last step on others; "
            f"resume on {before} ranks, or leave out {rows % step:,} samples, where that matters",
            logging.WARNING,
        )
