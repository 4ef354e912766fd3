"""States of the random generators of a rank, saved and restored: torch's, Python's and NumPy's."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from hf_zero.checkpoint.manifest import RNG
from hf_zero.device import kinds
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger, parse_json

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
