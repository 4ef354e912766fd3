"""The place of a run in its training data, and what saves and loads keep on an engine.

The place of a loader that counts samples of all ranks is a field of the manifest (FORMAT.md,
`loader`), and that of a loader with a state of its own bytes in each rank's file, as the random
generators are.
"""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_zero.checkpoint.manifest import LOADER, Manifest
from hf_zero.checkpoint.script_state import saved_and_loaded
from hf_zero.checkpoint.tensorfile import TensorReader
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, log_rank0
from hf_zero.zero.training_engine import TrainingEngine

if TYPE_CHECKING:
    from hf_zero.checkpoint.commit import SavesOfHost
    from hf_zero.zero.step.window import Counters


class WindowStart:
    """The place in the training data, and the counters, at the start of an accumulation window. A
    save inside the window records them: its gradients are not saved, and a resumed run repeats all
    of it. A save between windows records the present ones.
    """

    def __init__(self) -> None:
        # place and iterations: of a loader that counts samples of all ranks
        self._place: dict[str, int] | None = None
        # number of loader iterations begun before the window, and whether its first batch begins
        # the next
        self._iterations, self._is_between = 0, False
        # state of a stateful loader, b"" before its first batch; None: not known, or not saved
        self._loader_state: bytes | None = b""
        self._loader_error: CheckpointError | None = None

    def note(self, engine: TrainingEngine, state: bytes | None = None) -> None:
        """Record the present as the start of the next window. ``state``: what a stateful loader
        has loaded, b"" if it begins anew.
        """
        loader = engine.training_dataloader
        if hasattr(loader, "place"):
            self._place, self._iterations = loader.place, loader.iterations
            self._is_between = loader.resumed or _past_the_end(loader, self._place)
        elif state is not None:
            self._loader_state, self._loader_error = state, None
        elif is_stateful(loader):
            window = engine.accumulation
            self._loader_state, self._loader_error = None, None
            try:  # a window of one micro-batch is never open at a save
                if window.accumulation_steps > 1 or not window.managed:
                    self._loader_state = _serialized(loader)
            except CheckpointError as error:
                self._loader_error = error

    def counters(self, engine: TrainingEngine) -> Counters:
        """Return the counters without the micro-batches of an open window."""
        if not engine.window_is_open:
            return engine.counters
        return engine.accumulation.counters_before(engine.counters)

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

    def loader_state(self, engine: TrainingEngine) -> dict[str, torch.Tensor]:
        """Return the state of a stateful loader, as bytes by the name of their tensor; {} for any
        other. Raises CheckpointError for a state that needs a pickle.
        """
        loader = engine.training_dataloader
        if not is_stateful(loader):
            return {}
        if engine.window_is_open and self._loader_error is not None:
            raise self._loader_error
        content = self._loader_state if engine.window_is_open else _serialized(loader)
        if content is None:
            raise CheckpointError(
                f"the state of the loader ({type(loader).__name__}) at the first micro-batch of "
                "this accumulation window is not known, because the number of micro-batches of a "
                "step has changed; save after the step that ends the window"
            )
        if not content:  # a loader without a saved state begins with its first batch
            return {}
        return {LOADER: torch.frombuffer(bytearray(content), dtype=torch.uint8)}


class LoadCount(Protocol):
    """The count of loads of a run, which its generations keep (``generations.py``)."""

    exist: bool
    attempt: int

    def loaded(self, attempt: int, step: int, goes_back: bool) -> None: ...


class SavedEngine(TrainingEngine):
    """A training engine with what its saves and loads keep on it."""

    generations: LoadCount
    window_start: WindowStart
    save_log: SavesOfHost


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
    try:
        return saved_and_loaded(loader.state_dict())[0]
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise CheckpointError(
            f"the state of the loader ({type(loader).__name__}) cannot be saved without a pickle "
            f"that runs code when it is loaded ({error}); its state_dict() may hold numbers, "
            "strings, tensors, lists and dicts"
        ) from error


def restore(engine: SavedEngine, manifest: Manifest, file: TensorReader | None) -> None:
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
