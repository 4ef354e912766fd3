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
    from hf_zero.zero.pass_runner import Counters
    from hf_zero.zero.training_engine import TrainingEngine


class WindowStart:
    """The place in the training data where an accumulation window begins. A save inside the window
    records it: its gradients are not saved, and a resumed run repeats all of it.
    """

    def __init__(self) -> None:
        self._place: dict[str, int] | None = None
        # number of loader iterations begun before the window, and whether its first batch begins
        # the next
        self._iterations, self._is_between = 0, False
        # state of a loader with a state of its own: not known, or b"" before its first batch
        self._own: bytes | CheckpointError | None = b""

    def note(self, engine: TrainingEngine, state: bytes | None = None) -> None:
        """Record the present as the start of the next window. ``state``: what a stateful loader
        has loaded, b"" if it begins anew.
        """
        loader = engine.training_dataloader
        if hasattr(loader, "place"):
            self._place, self._iterations = loader.place, loader.iterations
            self._is_between = loader.resumed or _past_the_end(loader, self._place)
        elif state is not None:
            self._own = state
        elif is_stateful(loader):
            window = engine.accumulation
            try:  # a window of one micro-batch is never open at a save
                several = window.accumulation_steps > 1 or not window.managed
                self._own = _serialized(loader) if several else None
            except CheckpointError as error:
                self._own = error

    def counters(self, engine: TrainingEngine) -> Counters:
        """Return the counters without the micro-batches of an open window."""
        window = engine.accumulation
        counted = window.managed and window.micro_batches > 0 and engine.window_is_open
        return window.before if counted and window.before is not None else engine.counters

    def data_position(self, engine: TrainingEngine) -> dict[str, int]:
        """Return the place in the training data from which a resumed run continues, equal on all
        ranks; {} for a loader without one.
        """
        loader = engine.training_dataloader
        if not hasattr(loader, "place"):
            return {}
        position = loader.place
        if engine.window_is_open:
            passed = loader.iterations - self._iterations
            if self._place is not None and passed <= int(self._is_between):
                position = self._place
            else:  # the script has left the loop of the last window, and begun another
                position = {**position, "samples": 0}
        return in_next_epoch(loader, position)

    def own_state(self, engine: TrainingEngine) -> dict[str, torch.Tensor]:
        """Return the state of a loader with a ``state_dict`` of its own, as bytes by the name of
        their tensor; {} for any other. Raises CheckpointError for a state that needs a pickle.
        """
        loader = engine.training_dataloader
        if not is_stateful(loader):
            return {}
        content = self._own if engine.window_is_open else _serialized(loader)
        if isinstance(content, CheckpointError):
            raise content
        if content is None:
            raise CheckpointError(
                f"the state of the loader ({type(loader).__name__}) at the first micro-batch of "
                "this accumulation window is not known, because the number of micro-batches of a "
                "step has changed; save after the step that ends the window"
            )
        if not content:  # a loader without a saved state begins with its first batch
            return {}
        return {LOADER: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def is_stateful(loader: object) -> bool:
    """Return whether ``loader`` has its own ``state_dict`` and ``load_state_dict``, like
    torchdata's ``StatefulDataLoader``.
    """
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(type(loader), name, None)) for name in names)


def in_next_epoch(loader: object, position: dict[str, int]) -> dict[str, int]:
    """Return ``position``; if no batch of its epoch is left, the start of the next epoch."""
    if not _past_the_end(loader, position):
        return dict(position)
    return {**position, "epoch": position["epoch"] + 1, "samples": 0}


def _past_the_end(loader: Any, position: dict[str, int]) -> bool:
    remaining = loader.data_sampler.total_size - position["samples"]
    return bool(remaining < (loader.samples_of_all_ranks if loader.drop_last else 1))


def _serialized(loader: Any) -> bytes:
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
    return buffer.getvalue()


def restore(engine: TrainingEngine, manifest: Manifest, file: TensorFile | None) -> None:
    """Put the engine's loader at the saved place; log why if it begins anew. ``file``: that of this
    rank, if as many ranks have saved.
    """
    loader = engine.training_dataloader
    if hasattr(loader, "place") and manifest.loader:
        loader.continue_from(in_next_epoch(loader, manifest.loader))
        engine.window_start.note(engine)
        _warn_other_samples(loader, manifest)
        return
    if is_stateful(loader) and file is not None and LOADER in file.entries:
        content = torch.empty(file.entries[LOADER].numel, dtype=torch.uint8)
        file.read_into(LOADER, 0, content)
        state = content.numpy().tobytes()
        loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        engine.window_start.note(engine, state)
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
    engine.window_start.note(engine, b"")
    progress = counted(manifest.counters.get("global_steps", 0), "step")
    if manifest.batch:
        progress += f" of {counted(manifest.batch['samples'], 'sample')}"
    log_rank0(
        f"the place in the training data is not restored: {why}; skip in the script what it has "
        f"trained on ({progress})",
        logging.WARNING,
    )


def _warn_other_samples(loader: Any, manifest: Manifest) -> None:
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
