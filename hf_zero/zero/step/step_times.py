"""Milliseconds of forward, backward and step (``wall_clock_breakdown``), with a device
synchronisation before and after each.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.logging import logger

PARTS = ("fwd", "bwd", "step")


_NOTHING: AbstractContextManager[None] = nullcontext()


class _Timed:
    def __init__(self, milliseconds: dict[str, float], part: str, device: torch.device):
        self._milliseconds, self._part, self._device = milliseconds, part, device

    def __enter__(self) -> None:
        kinds.synchronize(self._device)
        self._began = time.perf_counter()

    def __exit__(self, *raised: Any) -> None:
        kinds.synchronize(self._device)
        self._milliseconds[self._part] += 1e3 * (time.perf_counter() - self._began)


class StepTimes:
    """Times of one engine. ``micro_batch`` and ``window``: milliseconds by part for the last
    ``engine.step()`` with its forwards and backwards, and for the last accumulation window; empty
    unless measured.
    """

    def __init__(self, config: ZeroConfig, device: torch.device, rank: int):
        self.micro_batch: dict[str, float] = {}
        self.window: dict[str, float] = {}
        self._on = config.wall_clock_breakdown
        every = config.steps_per_print
        self._every = 1 if every is None or math.isinf(every) else max(1, int(every))
        self._device, self._rank = device, rank
        self._now = dict.fromkeys(PARTS, 0.0)
        self._in_window = dict.fromkeys(PARTS, 0.0)
        self._to_print: list[dict[str, float]] = []  # windows since the last line

    def timed(self, part: str) -> _Timed | AbstractContextManager[None]:
        """Return a context manager for a forward ("fwd"), a backward ("bwd") or a "step"."""
        return _Timed(self._now, part, self._device) if self._on else _NOTHING

    def end(self, ends_window: bool, steps: int) -> None:
        """End a step() call, the last of ``steps`` so far if it ``ends_window``. Rank 0 logs a line
        every ``steps_per_print`` steps.
        """
        if not self._on:
            return
        self.micro_batch, self._now = self._now, dict.fromkeys(PARTS, 0.0)
        for part, milliseconds in self.micro_batch.items():
            self._in_window[part] += milliseconds
        if not ends_window:
            return
        self.window, self._in_window = self._in_window, dict.fromkeys(PARTS, 0.0)
        self._to_print.append(self.window)
        if steps % self._every == 0:
            self._print(steps)

    def _print(self, steps: int) -> None:
        windows, self._to_print = self._to_print, []
        if self._rank == 0:
            means = {part: sum(w[part] for w in windows) / len(windows) for part in PARTS}
            logger.info(
                "step %d: time (ms) | %s, means of %d steps",
                steps,
                " | ".join(f"{part}: {mean:.2f}" for part, mean in means.items()),
                len(windows),
            )
