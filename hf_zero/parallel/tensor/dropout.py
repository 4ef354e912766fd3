"""Random numbers of tensor-parallel ranks: different on each rank for activations that are parts,
and the same on all ranks elsewhere.

[Note: one generator]
Tensor-parallel ranks hold their generators in one state (checked by ``agreement.py``). Where
activations become parts, one number is drawn, equal on all ranks; the generator continues from
there once activations are whole again. This number and the rank give the seed of the generators in
between. So nothing has to be saved or restored beside torch's own states: a recomputed forward
draws the same numbers, and so does a training resumed with the states of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.device import kinds
from hf_zero.parallel.tensor.axis import TensorAxis

_STEP = 0x9E3779B97F4A7C15  # separates the seeds of ranks
_SEEDS = 2**63 - 1


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that a forward on ``device`` may draw from."""
    states = [torch.get_rng_state()]
    if not kinds.is_synchronous(device):
        states.append(kinds.module_of(device).get_rng_state(device))
    return states


def set_generator_states(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Set the generators of :func:`generator_states`."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        kinds.module_of(device).set_rng_state(states[1], device)


class OwnRandomNumbers:
    """Switch torch's generators between shared and own states, for activations that are parts."""

    def __init__(self, axis: TensorAxis, device: torch.device):
        self._axis, self._device = axis, device
        self._where: str | None = None  # parent of the layers whose outputs are parts now
        self._states: list[torch.Tensor] = []  # shared states to restore
        self._recomputes = False

    def __deepcopy__(self, memo: dict[int, object]) -> OwnRandomNumbers:
        memo[id(self)] = copied = OwnRandomNumbers(self._axis, self._device)
        return copied

    @torch.compiler.disable
    def begin(self, where: str) -> None:
        """Switch to own states: activations are parts from now on, after the layers ``where``."""
        if self._where == where:
            return
        # a begin without its end was interrupted: the states it kept are outdated
        self._where = where
        seed = int(torch.randint(_SEEDS, ()))
        self._states = generator_states(self._device)
        self._recomputes = torch._C._current_graph_task_id() != -1
        own_seed = (seed ^ (self._axis.rank + 1) * _STEP) & _SEEDS
        torch.default_generator.manual_seed(own_seed)
        if not kinds.is_synchronous(self._device):
            kinds.module_of(self._device).manual_seed(own_seed)

    @torch.compiler.disable
    def end(self) -> None:
        """Restore the shared states: activations are whole again."""
        if self._where is not None:
            self._restore()

    def reset(self) -> None:
        """Reset when a forward of the whole model begins: the previous one may have raised."""
        if self._where is not None and not self._recomputes:
            self._restore()
        self._where, self._states = None, []

    def _restore(self) -> None:
        set_generator_states(self._states, self._device)
        self._where, self._states = None, []
