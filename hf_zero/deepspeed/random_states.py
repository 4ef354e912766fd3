"""The named random states in which Megatron's scripts draw dropout masks, as
``deepspeed.checkpointing`` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_zero.activations import checkpointing as recompute
from hf_zero.deepspeed.accelerator import get_accelerator
from hf_zero.errors import ConfigError

MODEL_PARALLEL = "model-parallel-rng"
# Megatron's offset between the seeds of data parallelism and of model parallelism
OFFSET = 2718


class RandomStates:
    """States of the device's generator by name.

    ``fork`` draws from one and restores the default state afterwards.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start the state ``name`` from ``seed``. Raises ConfigError if either is in use."""
        if name in self._states or seed in self._seeds:
            raise ConfigError(
                f"the random state {name!r} or its seed {seed} is in use already; choose another, "
                "or call reset() first"
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self._states[name] = device.get_rng_state()
        self._seeds.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        if name not in self._states:
            raise ConfigError(
                f"there is no random state {name!r}; add({name!r}, seed) makes one, "
                "model_parallel_cuda_manual_seed the usual one"
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.get_rng_state()
            device.set_rng_state(before)


_states = RandomStates()
recompute.named_states.append(_states)  # recomputations draw what the forward has drawn


def get_cuda_rng_tracker() -> RandomStates:
    """Return the random states of this process, for whatever device it uses."""
    return _states


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator and, separately, the state for model-parallel regions; there is
    one model-parallel rank.
    """
    _states.reset()
    get_accelerator().manual_seed(seed)
    _states.add(MODEL_PARALLEL, seed + OFFSET)
