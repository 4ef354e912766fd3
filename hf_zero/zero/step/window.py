"""The accumulation window of a script with the counters of its run, and warnings about calls of a
script that fail in silence: non-finite gradients, backwards without a step.

[Note: read one step late]
Only the device knows whether a norm is finite, and the host does not wait for it. Rank 0 copies the
norm and its loss to host memory after the step, with an event, and reads them in a later step, once
the event is over. Only one copy is under way at a time: a host that runs far ahead of its device
may name a step after the first bad one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hf_zero.device import kinds, pinned, streams
from hf_zero.errors import UnmanagedWindowError
from hf_zero.logging import logger

# number of backwards: a step of one micro-batch may well add up the gradients of several losses
FORGOTTEN = 8
RESTARTED = 3  # windows restarted in a row, after which a script restarts all of them


@dataclass
class Counters:
    """Steps, samples and micro-batches since the beginning of the run."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


class AccumulationWindow:
    """The micro-batches whose gradients one step uses: ``accumulation_steps`` of them, unless the
    script sets the end of a window. Not ``managed``: every step ends one.
    """

    def __init__(self, accumulation_steps: int, managed: bool = True):
        # as the configuration and the script say
        self.accumulation_steps = accumulation_steps
        self.managed = managed
        self.boundary: bool | None = None  # whether the next backward ends it, if the script says
        self.syncs = True  # False inside no_sync
        # of the window: number of step() calls, or of backwards if not managed; the counters before
        # its first micro-batch was counted
        self.micro_batches = 0
        self.counters_before: Counters | None = None
        # Backwards since the last step() or zero_grad(): each that leaves the window open, as the
        # script has said, is a micro-batch; those that may close it are one together.
        self.open_backwards, self.closing_backward = 0, False
        # micro-batches and these backwards before the last backward
        self.before_last_backward = (0, 0, False)
        # since the last step(): a backward was called or a gradient written, even if no hook of the
        # model ran; zero_grad() has dropped one
        self.expects_gradients = self.was_dropped = False
        # of the run: calls of step() that have counted, those that have ended a window, and the
        # forwards with gradients before the last call
        self.steps = self.updates = self.forwards_at_step = 0
        # windows that had begun and were restarted, in the run and since the last update
        self.restarts = self.restarts_in_a_row = 0
        # Whether the script calls optimizer.zero_grad() after every micro-batch inside a window;
        # None before the second micro-batch of the first window.
        self.zeroes_inside: bool | None = None
        self.zeroed = False  # it has, since the last micro-batch

    @property
    def ends(self) -> bool:
        """Return whether the backward under way, or the next, is known to end the window; False
        without managed accumulation, unless the boundary has been set.
        """
        if self.boundary is not None:
            return self.boundary
        return self.managed and self.micro_batches + 1 >= self.accumulation_steps

    @property
    def ends_by_step(self) -> bool:
        """Return whether a step now ends the window."""
        return self.ends or not self.managed

    def add_micro_batch(self, counters: Counters) -> None:
        """Count a micro-batch that does not end the window, before ``counters`` do."""
        if not self.micro_batches:
            self.counters_before = replace(counters)
        self.micro_batches += 1
        self.zeroed = False

    @property
    def held_micro_batches(self) -> int:
        """Number of micro-batches whose gradients the next update will use, or whose update awaits
        its ``step()``.
        """
        backwards = self.open_backwards + self.closing_backward if self.managed else 0
        return self.micro_batches + backwards

    @property
    def awaits_backward(self) -> bool:
        """Return whether no backward has come since the last ``step()`` or ``zero_grad()``."""
        came = self.open_backwards or self.closing_backward or self.expects_gradients
        return not (came or (self.micro_batches and not self.managed))

    def begin_backward(self, closes: bool) -> None:
        """Count a backward; ``closes``: the script has not said that the window stays open."""
        is_first = not (self.open_backwards or self.closing_backward)
        if self.managed and self.micro_batches and is_first:
            self.zeroes_inside = self.zeroed and self.zeroes_inside is not False
        self.before_last_backward = self.micro_batches, self.open_backwards, self.closing_backward
        if not self.managed:
            self.micro_batches += 1
        elif closes:
            self.closing_backward = True
        else:
            self.open_backwards += 1

    def keeps_at_zero_grad(self) -> bool:
        """Return whether ``optimizer.zero_grad()`` now leaves the window as it is: inside one, from
        a script that calls it after every micro-batch, as it calls ``step()``.
        """
        if not (self.managed and self.micro_batches and self.awaits_backward):
            return False
        self.zeroed = True
        return self.zeroes_inside is not False

    def restart(self) -> None:
        """Begin another window: the gradients of this one have been dropped."""
        self.was_dropped |= not self.awaits_backward
        if self.micro_batches or not self.awaits_backward:
            self.restarts += self.managed
            self.restarts_in_a_row += bool(self.micro_batches)
        self.take_count(restart=True)

    def take_count(self, restart: bool = False) -> int:
        """Return, and reset, the number of micro-batches since the last ``step()`` or
        ``zero_grad()``, at least 1; without managed accumulation, return the backwards of the
        window. ``restart``: the next micro-batch is the first of a window.
        """
        backwards = self.open_backwards + self.closing_backward
        count = max(1, backwards) if self.managed else self.micro_batches
        self.open_backwards, self.closing_backward = 0, False
        self.expects_gradients = False
        if restart:
            self.micro_batches = 0
        return count

    def set_micro_steps(self, micro_steps: int) -> None:
        """Set the place in the window after ``micro_steps`` micro-batches in the whole run."""
        self.micro_batches = micro_steps % self.accumulation_steps

    def undo_backward(self) -> None:
        """Take the last backward out of the counts: an exception has broken it."""
        self.micro_batches, self.open_backwards, self.closing_backward = self.before_last_backward

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward ends the window; raises as :meth:`refuse_unmanaged`."""
        self.refuse_unmanaged("set_gradient_accumulation_boundary()")
        self.boundary = is_boundary

    def refuse_unmanaged(self, what: str) -> None:
        """Raise UnmanagedWindowError for ``what`` if every step ends a window."""
        if not self.managed:
            raise UnmanagedWindowError(
                f"{what} has no use where managed_gradient_accumulation is false: every step() "
                "ends the accumulation window; leave the call out, or remove the key"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for backwards that do not end the window."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before


class SanityChecks:
    """The checks of one engine; only rank 0 checks and warns, each warning once."""

    def __init__(self, device: torch.device, window: AccumulationWindow, precision: str, rank: int):
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
        if self._copied is not None:
            if not self._copied.query():
                return
            self._copied = None
            self._report()
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
