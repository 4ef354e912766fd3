"""Reports on steps: the interface of their measures, and warnings about silent failures:
non-finite gradients, and backwards without a step.

[Note: read one step late]
Only the device knows whether a norm is finite, and the host does not wait for it. Rank 0 copies the
norm and its loss to host memory after the step, with an event, and reads them in a later step, once
the event is over. Only one copy is under way at a time: a host that runs far ahead of its device
may name a step after the first bad one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from hf_zero.device import kinds, pinned, spans, streams
from hf_zero.logging import logger

# number of backwards: a step of one micro-batch may well add up the gradients of several losses
FORGOTTEN = 8
RESTARTED = 3  # windows restarted in a row, after which a script restarts all of them

Engine = TypeVar("Engine")


class StepWindow(Protocol):
    """The accumulation window of an engine, a
    :class:`hf_zero.zero.pass_runner.AccumulationWindow`.
    """

    accumulation_steps: int
    syncs: bool

    @property
    def ends(self) -> bool: ...


class SanityChecks:
    """The checks of one engine; only rank 0 checks and warns, each warning once."""

    def __init__(self, device: torch.device, window: StepWindow, precision: str, rank: int):
        """``window.accumulation_steps``: the micro-batches of a step."""
        self._device, self._precision, self._window = device, precision, window
        self._on_host = kinds.is_synchronous(device)
        self._warns = rank == 0
        self._backwards = 0
        self._loss: torch.Tensor | None = None
        self._warned: set[str] = set()
        self._copied: streams.Event | None = None  # recorded after the copy of the step's numbers
        self._step = 0
        self._numbers: torch.Tensor | None = None  # [2] float64 in host memory: norm, loss
        self._values: ctypes.Array[ctypes.c_double] | None = None  # the same memory

    def on_backward(self, ends_window: bool) -> None:
        """Count a backward; ``ends_window`` is False if the script has said that more backwards of
        its window follow.
        """
        self._backwards += ends_window
        steps = self._window.accumulation_steps
        if self._backwards > max(FORGOTTEN, steps):
            window = f", also inside a window of {steps} micro-batches" if steps > 1 else ""
            self._warn(
                "backwards",
                f"{self._backwards} backwards without engine.step(): gradients add up and no "
                f"weight has changed; call engine.step() after each engine.backward(loss){window}, "
                "or engine.zero_grad() to drop what has been added up",
            )

    def on_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of this rank's backward."""
        if self._warns:
            self._loss = loss.detach()

    def on_step(self, inside_window: bool) -> None:
        """Handle a call of ``step()`` or ``zero_grad()``; ``inside_window``: it only counts a
        micro-batch of an open window.
        """
        backwards, self._backwards = self._backwards, 0
        steps = self._window.accumulation_steps
        if inside_window and backwards == steps:
            self._warn(
                "windows",
                f"engine.step() after {backwards} backwards has counted one micro-batch of {steps} "
                f"and changed no weight: with gradient_accumulation_steps = {steps} call it after "
                f"each engine.backward(loss), and every {steps}th call updates; where the loop "
                "itself collects micro-batches, set gradient_accumulation_steps to 1 and divide "
                "the loss by their number",
            )

    def on_empty_step(self) -> None:
        """Warn of a call of ``step()`` without a backward since the last one."""
        self._warn(
            "empty",
            "step() without a backward since the last step() counts nothing: leave out a second "
            "call, such as optimizer.step() beside engine.step(); a rank whose batch has no loss "
            "calls engine.backward(0.0 * outputs.sum())",
        )

    def on_restart(self, number: int) -> None:
        """Handle the restart of a window, the last of ``number`` without an update."""
        if number == RESTARTED:
            self._warn(
                "restarts",
                f"engine.zero_grad() has restarted {number} accumulation windows in a row, of "
                f"{self._window.accumulation_steps} micro-batches each, and no weight has changed: "
                "call it after the step that ends a window, or leave it out, as that step drops "
                "the gradients",
            )

    def on_zero_grad_inside(self, micro_batches: int) -> None:
        """Warn of the first ``optimizer.zero_grad()`` inside the first window, after
        ``micro_batches`` of it.
        """
        self._warn(
            "zero_grad",
            f"optimizer.zero_grad() after micro-batch {micro_batches} of "
            f"{self._window.accumulation_steps} keeps the gradients of the first accumulation "
            "window, as for scripts that call it after every micro-batch; to drop a window that "
            "was broken off call engine.restart_window()",
        )

    def on_norm(self, norm: torch.Tensor, step: int) -> None:
        """Check the gradient norm of ``step``, 0-dim on the device, without waiting for it."""
        loss, self._loss = self._loss, None
        if not self._warns or "finite" in self._warned:
            return
        self._look()
        if self._copied is not None:
            return
        if self._numbers is None:
            self._numbers = (
                torch.empty(2, dtype=torch.float64)
                if kinds.is_synchronous(self._device)
                else pinned.empty(2, torch.float64)
            )
            self._values = (ctypes.c_double * 2).from_address(self._numbers.data_ptr())
        loss = torch.zeros_like(norm) if loss is None or loss.device != norm.device else loss
        self._numbers.copy_(
            torch.stack([norm.double().reshape(()), loss.double().reshape(())]), non_blocking=True
        )
        self._step = step
        if self._on_host:
            self._report()
        else:
            self._copied = streams.record_here(self._device)

    def _look(self) -> None:
        if self._copied is not None and self._copied.query():
            self._copied = None
            self._report()

    def _report(self) -> None:
        assert self._values is not None
        norm, loss = self._values
        if math.isfinite(norm) and math.isfinite(loss):
            return
        what = (
            f"the gradient norm is {norm:g}"
            if math.isfinite(loss)
            else f"the loss of rank 0 is {loss:g} and the gradient norm {norm:g}"
        )
        if math.isfinite(norm):
            after = "; the weights are still finite"
        else:
            after = "; a NaN in the weights stays there: go on from a checkpoint before this step"
        narrow = (
            "its precision (bf16: does it happen in fp32?), " if self._precision == "bf16" else ""
        )
        self._warn(
            "finite",
            f"step {self._step}: {what}{after}. Look at the learning rate and its warm-up, the "
            "batches of this step (inputs that are not finite, "
            f"labels that are all ignored), {narrow}gradient_clipping; "
            "torch.autograd.set_detect_anomaly(True) names the operation",
        )

    def _warn(self, kind: str, text: str) -> None:
        if self._warns and kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)


class StepMeasures(Generic[Engine]):
    """Measures of the steps of one engine. Every method does nothing here; an engine whose
    configuration asks for measures has ``hf_zero.measures.step.EngineMeasures``.

    ``counts_samples``: they add to ``counters.global_samples`` if no batch size is configured.
    """

    counts_samples = False

    def forward(
        self, engine: Engine, args: object, kwargs: object
    ) -> AbstractContextManager[object]:
        """Return a context for a forward with these arguments."""
        return spans.NOTHING

    def backward(
        self, engine: Engine, loss: torch.Tensor, weighed: bool
    ) -> AbstractContextManager[object]:
        """Return a context for the backward of ``loss``, which is ``weighed`` if it has its weight
        in the accumulation window already.
        """
        return spans.NOTHING

    def begin_update(self, engine: Engine) -> None:
        """Note the settings of an update in the backward, before it ends."""

    def step(self, engine: Engine) -> AbstractContextManager[object]:
        """Return a context for a ``step()`` call. May be collective."""
        return spans.NOTHING

    def divided_by(self, steps: int | None) -> None:
        """Note that losses with their weight in them are, from the next one on, divided by
        ``steps``, the micro-batches of a full window; None: by another number.
        """

    def zero_grad(self) -> None:
        """Drop the losses whose gradients are dropped."""

    def trace(self, engine: Engine, steps: int, folder: str) -> None:
        """Trace the next ``steps`` steps into ``folder`` (collective)."""

    # ---- between steps ----

    @property
    def figures(self) -> Mapping[str, object]:
        """The figures of the last step that has been read, for the trackers of a script; empty
        unless asked for.
        """
        return {}

    @property
    def folder(self) -> Path | None:
        """The folder of ``metrics.jsonl`` on the rank that writes it, once it is known."""
        return None

    def shown_elsewhere(self) -> None:
        """Log no line of a step unless a key asks for it: a trainer shows its own."""

    def finish(self, engine: Engine) -> None:
        """Read the figures of all steps; waits for the device."""

    def keep_in(self, folder: str) -> None:
        """Write files to ``folder`` unless the configuration, or an earlier call, names one.
        Collective: an error of rank 0 is raised on all.
        """

    def plan_steps(self, steps: int) -> None:
        """Record the number of steps after which the run will end."""

    def note_evaluation(self, engine: Engine, values: Mapping[str, object]) -> None:
        """Record those of a script's logged ``values`` that are results of an evaluation."""

    def saving(self, engine: Engine, folder: str) -> None:
        """Write out all figures: a checkpoint is about to be saved in ``folder``."""

    def loaded(self, engine: Engine, continues: bool, folder: str | None) -> None:
        """Continue from the step of a checkpoint that was loaded, unless it was weights alone.
        ``folder``: of its run; None if it is not known.
        """

    def close(self, engine: Engine) -> None:
        """End all measures."""
