"""The line of the log about a step: when it is due, and its text."""

from __future__ import annotations

import logging
import math
import sys
import time

from hf_zero.config import ZeroConfig
from hf_zero.config.files import is_written
from hf_zero.logging import in_units, logger
from hf_zero.measures.figures import Figures

SECONDS = 30.0  # between two lines that no key asks for
# figures of the line, with their names there
PRINTED = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "loss_scale": "loss_scale",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "step_ms": "ms/step",
}


class StepLine:
    """The line of one engine, on the rank that logs it.

    ``every``: steps between two lines; 0 if no key asks for them. ``by_time``: rank 0 then logs its
    first step, and a line each 30 seconds at most, unless a bar of tqdm is open or null or
    infinity is written as ``steps_per_print``. No rank but rank 0 takes part in these.
    """

    def __init__(self, config: ZeroConfig, rank: int):
        every = config.steps_per_print
        self.every = 0 if every is None or math.isinf(every) else max(1, int(every))
        # null and infinity are read as None; Accelerate writes infinity by habit
        refused = not self.every and is_written(config.sources["steps_per_print"])
        self.by_time = rank == 0 and not refused and logger.isEnabledFor(logging.INFO)
        self._next = 0.0

    def is_due(self, step: int) -> bool:
        """Whether ``step`` has a line, as far as it is known before the step."""
        if self.every:
            return step % self.every == 0
        return self.by_time and time.monotonic() >= self._next

    def log(self, figures: Figures, of_rank_0: bool) -> None:
        """Log the line of ``figures`` if it is due; ``of_rank_0``: the loss is rank 0's own."""
        step = figures["step"]
        if not self.is_due(step):
            return
        self._next = time.monotonic() + SECONDS
        if self.every or not _bar_is_open():
            logger.info("step %d: %s", step, _text(figures, of_rank_0))


def _bar_is_open() -> bool:
    """Return whether a bar of tqdm is on the terminal of this process."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bool(getattr(bars, "_instances", ()))


def _text(figures: Figures, of_rank_0: bool) -> str:
    """Return the figures, with the bytes of this rank's state and the most that its device has
    held.
    """
    shown = [f"{label} {figures[name]:.6g}" for name, label in PRINTED.items() if name in figures]
    if of_rank_0 and "loss" in figures:
        shown[0] += " (rank 0's batches only)"
    state = sum(figures.get(f"{tier}_bytes", 0) for tier in ("device", "ram", "disk"))
    shown.append(f"model state {in_units(state)}")
    if "peak_device_bytes" in figures:
        shown.append(f"peak device memory {in_units(figures['peak_device_bytes'])}")
    return ", ".join(shown)
