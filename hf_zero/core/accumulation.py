"""How far training is: the counters of a run, and the accumulation window that a step ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Counters:
    """Steps, samples and micro-batches since the beginning of the run."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


class AccumulationWindow:
    """The micro-batches whose gradients one step uses: ``steps`` of them, unless the script says
    where a window ends.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.micro_batches = 0  # counted since the last step
        self.boundary: bool | None = None  # whether the next backward ends it, said by the script
        self.syncs = True  # False inside no_sync

    @property
    def ends(self) -> bool:
        """Whether the backward under way, or the next, is the last of the window."""
        if self.boundary is not None:
            return self.boundary
        return self.micro_batches + 1 >= self.steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside belong to a window that goes on."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before
