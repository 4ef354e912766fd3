"""The state of a run beside its model and optimizer: the place in the training data, the random
generators of each rank, client state and the schedule's.

The place of a loader that counts samples of all ranks is a field of the manifest (FORMAT.md,
`loader`), and that of a loader with a state of its own bytes in each rank's file, as the generators
are. Of client state and the schedule, what JSON does not hold is in ``objects.pt``.
"""

from __future__ import annotations

import io
import json
import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch

from hf_zero.checkpoint.manifest import LOADER, RNG, FileEntry, Manifest, class_name
from hf_zero.checkpoint.tensorfile import TensorReader, hash_of
from hf_zero.device import kinds
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, log_rank0, logger, parse_json
from hf_zero.zero.training_engine import TrainingEngine

if TYPE_CHECKING:
    from hf_zero.checkpoint.commit import SavesOfHost
    from hf_zero.zero.step.window import Counters

T = TypeVar("T")


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
        return _as_saved(loader.state_dict())[0]
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


MT19937 = "MT19937"  # NumPy's generator unless a script sets another
# of a state of that; the place of the next one, where a draw reads, is not checked by NumPy
NUMPYS_NUMBERS = 624
# torch holds a mutex while it creates the tensor of a generator's state. A garbage collection at
# that point may switch to another thread, which would wait for the mutex while it holds the GIL:
# a deadlock.
_generator = threading.Lock()


def rng_states() -> dict[str, torch.Tensor]:
    """Return the states of this rank's generators: torch's, and those of Python and NumPy as JSON.
    The accelerator's is included only if it is in use, so that a save does not initialize it.
    """
    with _generator:
        states = {f"{RNG}cpu": torch.get_rng_state()}
    others: dict[str, object] = {"python": random.getstate()}
    if _numpys_generator() == MT19937:
        others["numpy"] = np.random.get_state()
    else:
        _warn_of_generator()
    for kind, state in others.items():
        # padded, so that files of one run are equally long
        content = json.dumps(state, default=np.ndarray.tolist).encode().ljust(8192)
        states[f"{RNG}{kind}"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    accelerator = kinds.initialized_accelerator()
    if accelerator is not None:
        states[f"{RNG}{accelerator}"] = kinds.module_of(accelerator).get_rng_state()
    return states


def _numpys_generator() -> str:
    """Return the name of the generator behind NumPy's functions (``np.random.rand``)."""
    name: str = np.random.get_state(legacy=False)["bit_generator"]
    return name


@cache
def _warn_of_generator() -> None:
    """Warn, once in a process, that NumPy's generator is neither saved nor restored."""
    logger.warning(  # on the rank concerned: a script may replace it on some ranks alone
        "NumPy's generator was replaced (%s, or another at the save): its state is neither saved "
        "nor restored; keep the default, MT19937, or seed it after a resume",
        _numpys_generator(),
    )


def set_rng_state(kind: str, state: torch.Tensor) -> None:
    """Set the generator of ``kind``, as :func:`rng_states` names it, to ``state``.

    Raises CheckpointError for a state that it cannot have.
    """
    try:
        _set_rng_state(kind, state)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of the random generator {kind!r} is damaged: {error}; restore the file, or "
            "load another tag of this run"
        ) from error


def _set_rng_state(kind: str, state: torch.Tensor) -> None:
    if kind == "python":
        version, internal, gauss = parse_json(state.numpy().tobytes())
        random.setstate((version, tuple(internal), None if gauss is None else float(gauss)))
    elif kind == "numpy":
        saved = parse_json(state.numpy().tobytes())
        if isinstance(saved, dict) or _numpys_generator() != MT19937:
            _warn_of_generator()  # former releases wrote a dict for other generators
            return
        name, key, place, *gauss = saved
        if not (len(key) == NUMPYS_NUMBERS and 0 <= place <= NUMPYS_NUMBERS):
            raise ValueError(f"place {place} in {len(key)} of {NUMPYS_NUMBERS} numbers")
        np.random.set_state((name, key, place, *gauss))
    elif kind == "cpu":
        torch.set_rng_state(state)
    else:
        kinds.module_of(kind).set_rng_state(state)


def restorer_of_generators() -> Callable[[], None]:
    """Return a function that restores the present states of this rank's generators."""
    states = rng_states()

    def restore() -> None:
        for name, state in states.items():
            set_rng_state(name.removeprefix(RNG), state)

    return restore


@dataclass(frozen=True)
class NonTensorState:
    """State other than tensors, in the manifest's form, and its part for ``objects.pt``."""

    client_state: dict[str, object]
    lr_scheduler: dict[str, object] | None
    objects: dict[str, dict[str, object]]


def non_tensor_state(engine: TrainingEngine, client_state: Mapping[str, object]) -> NonTensorState:
    """Return the current state other than tensors. Raises CheckpointError if it cannot be saved."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"client_state={client_state!r:.80} is of type {type(client_state).__name__}; pass a "
            "dictionary"
        )
    client, objects_of_client = split("client_state", client_state)
    scheduler: dict[str, object] | None = None
    objects_of_scheduler: dict[str, object] = {}
    if hasattr(engine.lr_scheduler, "state_dict"):
        state, objects_of_scheduler = split(
            "the state of the lr scheduler", engine.lr_scheduler.state_dict()
        )
        scheduler = {"class": class_name(engine.lr_scheduler), "state": state}
    return NonTensorState(
        client, scheduler, {"client_state": objects_of_client, "lr_scheduler": objects_of_scheduler}
    )


def objects_file(extra: NonTensorState, name: str) -> tuple[FileEntry, bytes] | None:
    """Return entry and content of ``objects.pt``, called ``name``; None if all state is JSON."""
    if not any(extra.objects.values()):
        return None
    buffer = io.BytesIO()
    torch.save(extra.objects, buffer)
    content = buffer.getvalue()
    return FileEntry(name, 0, len(content), hash_of(content)), content


def is_json(value: object) -> bool:
    """Return whether ``json.loads(json.dumps(value))`` equals ``value``, with equal types (no
    tuples, no integer keys).
    """
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(is_json(item) for item in value)
    return type(value) is dict and all(
        type(key) is str and is_json(item) for key, item in value.items()
    )


def split(what: str, state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Divide ``state`` into its manifest form ``{"json", "objects"}`` and the values for
    ``objects.pt``.

    ``what`` names the state in errors. Raises CheckpointError for a value that neither form can
    hold.
    """
    plain, objects = {}, {}
    for key, value in state.items():
        if type(key) is not str:
            raise CheckpointError(
                f"{what} has the key {key!r} of type {type(key).__name__}; keys must be strings"
            )
        try:
            plain_value = is_json(value)
            json.dumps(value if plain_value else None)
        except (RecursionError, ValueError) as error:  # of cycles, depth, and digits of an integer
            raise CheckpointError(
                f"{what}[{key!r}] cannot be saved ({error}); store values that are not nested in "
                "themselves or thousands deep, and long integers as strings"
            ) from error
        if plain_value:
            plain[key] = value
        else:
            _check_loadable(f"{what}[{key!r}]", value)
            objects[key] = value
    return {"json": plain, "objects": sorted(objects)}, objects


def copy_as_saved(value: T) -> T:
    """Return a copy of ``value``, which a checkpoint can hold, as a load would return it."""
    return _as_saved(value)[1]


def _as_saved(value: T) -> tuple[bytes, T]:
    """Return the bytes of ``value`` in a checkpoint, and what a load returns for them. Raises any
    exception for a value that a checkpoint cannot hold.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    copy = torch.load(buffer, map_location="cpu", weights_only=True)
    return buffer.getvalue(), cast(T, copy)


def _check_loadable(what: str, value: object) -> None:
    try:
        copy_as_saved(value)
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise CheckpointError(
            f"{what} of type {type(value).__name__} cannot be saved without a pickle that executes "
            f"code ({str(error).splitlines()[0] if str(error) else type(error).__name__}); store "
            "numbers, strings, tensors, or lists and dictionaries of these"
        ) from error
