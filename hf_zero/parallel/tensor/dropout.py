"""Random numbers where activations are parts: each tensor-parallel rank draws its own there, and
the same as the others everywhere else.

[Note: one generator]
Tensor-parallel ranks hold their generators in one state (``agreement.py`` looks after that). Where
activations become parts, a number is drawn from it: the same on all ranks, and the generator goes
on from there once they are whole again. With it and the rank's number a seed is made, that the
device's generator has in between. So nothing has to be saved or restored beside torch's own states:
a checkpointed forward that runs again draws the same numbers, and so does a training that goes on
with the states of a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.device import kinds
from hf_zero.parallel.tensor.axis import TensorAxis

_STEP = 0x9E3779B97F4A7C15  # of one rank's seed to the next
_SEEDS = 2**63 - 1


class OwnRandomNumbers:
    """The states of torch's generators in a model whose activations are parts here and there."""

    def __init__(self, axis: TensorAxis, device: torch.device):
        self._axis, self._device = axis, device
        self._where: str | None = None  # the layers after which it is now
        self._states: list[torch.Tensor] = []  # to go back to
        self._recomputes = False

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnRandomNumbers:
        memo[id(self)] = copied = OwnRandomNumbers(self._axis, self._device)
        return copied

    @torch.compiler.disable
    def begin(self, where: str) -> None:
        """Activations are parts from now on; ``where``: after which layers."""
        if self._where == where:
            return
        # one that was begun and not ended was broken off: its states are those of another time
        self._where = where
        seed = int(torch.randint(_SEEDS, ()))
        self._states = self._kept()
        self._recomputes = torch._C._current_graph_task_id() != -1
        own = (seed ^ (self._axis.rank + 1) * _STEP) & _SEEDS
        torch.default_generator.manual_seed(own)
        if not kinds.is_host(self._device):
            kinds.module_of(self._device).manual_seed(own)

    @torch.compiler.disable
    def end(self) -> None:
        """They are whole again."""
        if self._where is not None:
            self._restore()

    def reset(self) -> None:
        """A forward of the whole model begins: the one before may have raised in between."""
        if self._where is not None and not self._recomputes:
            self._restore()
        self._where, self._states = None, []

    def _kept(self) -> list[torch.Tensor]:
        kept = [torch.get_rng_state()]
        if not kinds.is_host(self._device):
            kept.append(kinds.module_of(self._device).get_rng_state(self._device))
        return kept

    def _restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            kinds.module_of(self._device).set_rng_state(self._states[1], self._device)
        self._where, self._states = None, []
