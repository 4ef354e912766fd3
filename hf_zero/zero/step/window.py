"""The accumulation window of a script, with the counters of its run, and warnings about calls that
leave windows without an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto

from hf_zero.errors import UnmanagedWindowError
from hf_zero.logging import logger

# number of backwards: a step of one micro-batch may well add up the gradients of several losses
FORGOTTEN = 8
RESTARTED = 3  # windows restarted in a row, after which a script restarts all of them

# warnings of calls that leave weights unchanged
UNUSED_BACKWARDS = (
    "%d backwards without engine.step(): gradients add up and no weight has changed; call "
    "engine.step() after each engine.backward(loss)%s, or engine.zero_grad() to drop what has been "
    "added up"
)
WINDOW_IN_A_STEP = (
    "engine.step() after %d backwards has counted one micro-batch of %d and changed no weight: "
    "with gradient_accumulation_steps = %d call it after each engine.backward(loss), and every "
    "%dth call updates; where the loop itself collects micro-batches, set "
    "gradient_accumulation_steps to 1 and divide the loss by their number"
)
EMPTY_STEP = (
    "step() without a backward since the last step() counts nothing: leave out a second call, such "
    "as optimizer.step() beside engine.step(); a rank whose batch has no loss calls "
    "engine.backward(0.0 * outputs.sum())"
)
RESTARTS = (
    "engine.zero_grad() has restarted %d accumulation windows in a row, of %d micro-batches each, "
    "and no weight has changed: call it after the step that ends a window, or leave it out, as "
    "that step drops the gradients"
)
ZERO_GRAD_INSIDE = (
    "optimizer.zero_grad() after micro-batch %d of %d keeps the gradients of the first "
    "accumulation window, as for scripts that call it after every micro-batch; to drop a window "
    "that was broken off call engine.restart_window()"
)


@dataclass
class Counters:
    """Steps, samples and micro-batches since the beginning of the run."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


class BackwardPlace(Enum):
    """The place of a backward in its window, as far as it is known when the backward begins."""

    INSIDE = auto()  # the script has said that more backwards of the window follow
    UNDECIDED = auto()  # its ``step()`` decides
    LAST = auto()  # of the last micro-batch


class AccumulationWindow:
    """The micro-batches whose gradients one step uses: ``accumulation_steps`` of them, unless the
    script sets the end of a window. Not ``managed``: every step ends one.

    Its own methods alone set its attributes: each is an event, such as a backward that begins.
    ``warns``: of events that repeat without an update.
    """

    def __init__(self, accumulation_steps: int, managed: bool = True, warns: bool = False):
        # as the configuration and the script say
        self.accumulation_steps, self.managed = accumulation_steps, managed
        self.boundary: bool | None = None  # whether the next backward ends it, if the script says
        self.syncs = True  # False inside no_sync
        # of the window: number of step() calls, or of backwards if not managed; the counters before
        # its first micro-batch was counted
        self.micro_batches = 0
        self._counters_before: Counters | None = None
        # Backwards of a managed window since the last step() or zero_grad(): each that leaves the
        # window open, as the script has said, is a micro-batch; those that may close it are one
        # together.
        self.backwards, self._has_closing = 0, False
        # micro-batches and these backwards before the last backward
        self._before_last_backward = (0, 0, False)
        # since the last step(): a backward was called or a gradient written, even if no hook of the
        # model ran; zero_grad() has dropped one
        self._expects_gradients = self._was_dropped = False
        # of the run: windows that a step() has ended, and windows that had begun and were restarted
        self.updates = self.restarts = 0
        # forwards with gradients before the last step() that counted; None before the first
        self._forwards_at_step: int | None = None
        # Whether the script calls optimizer.zero_grad() after every micro-batch inside a window;
        # None before the second micro-batch of the first window.
        self._zeroes_inside: bool | None = None
        self._zeroed = False  # it has, since the last micro-batch
        # For warnings, each made once: backwards that may have closed a window, since step() or
        # zero_grad() was last called; restarts of windows with micro-batches since the last update.
        self._unused_backwards = self._restarts_in_a_row = 0
        self._warns, self._warned = warns, set[str]()

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of micro-batches, from the next window on."""
        self.accumulation_steps = accumulation_steps

    def set_micro_steps(self, micro_steps: int) -> None:
        """Set the place in the window after ``micro_steps`` micro-batches in the whole run."""
        self.micro_batches = micro_steps % self.accumulation_steps

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward ends the window; None: the number of micro-batches decides.
        Raises as :meth:`refuse_unmanaged`.
        """
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

    @property
    def next_backward(self) -> BackwardPlace:
        """The place in the window of a backward that begins now."""
        if not self.syncs or self.boundary is False:
            return BackwardPlace.INSIDE
        return BackwardPlace.LAST if self.ends else BackwardPlace.UNDECIDED

    def expect_gradients(self) -> None:
        """Handle a call of a backward, or a gradient that a script writes."""
        self._expects_gradients = True

    def begin_backward(self, place: BackwardPlace) -> bool:
        """Count a backward that begins at ``place``. Return whether it is the window's first."""
        self._before_last_backward = self.micro_batches, self.backwards, self._has_closing
        if self.managed and self.micro_batches and not self.backwards:
            self._zeroes_inside = self._zeroed and self._zeroes_inside is not False
        if not self.managed:
            self.micro_batches += 1
        elif place is BackwardPlace.INSIDE:
            self.backwards += 1
        else:
            self.backwards += not self._has_closing
            self._has_closing = True
            self._unused_backwards += 1
            if self._unused_backwards > max(FORGOTTEN, self.accumulation_steps):
                steps = self.accumulation_steps
                inside = f", also inside a window of {steps} micro-batches" if steps > 1 else ""
                self._warn(UNUSED_BACKWARDS, self._unused_backwards, inside)
        return not any(self._before_last_backward)

    def undo_backward(self) -> None:
        """Take the last backward out of the counts: an exception has broken it."""
        self.micro_batches, self.backwards, self._has_closing = self._before_last_backward

    @property
    def held_micro_batches(self) -> int:
        """Number of micro-batches whose gradients the next update will use, or whose update awaits
        its ``step()``.
        """
        return self.micro_batches + self.backwards

    @property
    def awaits_backward(self) -> bool:
        """Return whether no backward has come since the last ``step()`` or ``zero_grad()``."""
        came = self.backwards or self._expects_gradients
        return not (came or (self.micro_batches and not self.managed))

    def begin_step(self, is_updated: bool) -> bool:
        """Handle a call of ``step()``, and return whether it ends the window. ``is_updated``: it
        confirms an update in the backward.
        """
        ends_window = is_updated or not self.managed or self.ends
        backwards, self._unused_backwards = self._unused_backwards, 0
        if not ends_window and backwards == self.accumulation_steps:
            self._warn(WINDOW_IN_A_STEP, *[backwards] * 4)
        return ends_window

    def has_forward(self, forwards: int) -> bool:
        """Return whether the last of ``forwards``, those with gradients in the run, came after the
        last step, and no ``zero_grad()`` has dropped its gradients.
        """
        return forwards != (self._forwards_at_step or 0) and not self._was_dropped

    @property
    def lacks_backward(self) -> bool:
        """Return whether a step without a backward is an error: ``zero_grad()`` has dropped it, or
        none has come in the run.
        """
        return self._was_dropped or self._forwards_at_step is None

    def end_micro_batch(self, forwards: int, counters: Counters) -> int:
        """End a micro-batch that leaves the window open, after ``forwards`` in the run and before
        ``counters`` have it. Return the number of micro-batches that they count.
        """
        if not self.micro_batches:
            self._counters_before = replace(counters)
        self.micro_batches += 1
        self._zeroed = self._was_dropped = False
        self._forwards_at_step = forwards
        return self._take_backwards()

    def end_window(self, forwards: int) -> int:
        """End the window by a step, after ``forwards`` in the run. Return the number of
        micro-batches since the last step; of backwards, if not managed.
        """
        count = self._take_backwards()
        self.micro_batches = self._restarts_in_a_row = 0
        self.updates += 1
        self._was_dropped, self._forwards_at_step = False, forwards
        return count

    def _take_backwards(self) -> int:
        """Return, and reset, the number of micro-batches since the last ``step()`` or
        ``zero_grad()``, at least 1; without managed accumulation, return that of the window.
        """
        count = max(1, self.backwards) if self.managed else self.micro_batches
        self.backwards, self._has_closing, self._expects_gradients = 0, False, False
        return count

    def begin_update_in_backward(self) -> int:
        """Empty the window for an update in its last backward, until :meth:`await_step`. Return the
        number of micro-batches since the last step.
        """
        count = self._take_backwards()
        self.micro_batches = 0
        return count

    def await_step(self, backwards: int, micro_batches: int = 0) -> None:
        """Hold ``backwards``, after ``micro_batches`` of the window, for the step that ends it."""
        self.micro_batches, self.backwards, self._has_closing = micro_batches, backwards, True

    def counters_before(self, counters: Counters) -> Counters:
        """Return ``counters`` without the micro-batches that the window has counted."""
        if self.managed and self.micro_batches and self._counters_before is not None:
            return self._counters_before
        return counters

    def keeps_at_zero_grad(self) -> bool:
        """Handle ``optimizer.zero_grad()``. Return whether it keeps the window: inside one, from a
        script that calls it after every micro-batch, as it calls ``step()``.
        """
        if not (self.managed and self.micro_batches and self.awaits_backward):
            return False
        if self._zeroes_inside is None and not self._zeroed:
            self._warn(ZERO_GRAD_INSIDE, self.micro_batches, self.accumulation_steps)
        self._zeroed = True
        return self._zeroes_inside is not False

    def restart(self) -> None:
        """Begin another window: ``zero_grad()`` has dropped the gradients of this one."""
        held = not self.awaits_backward
        self._was_dropped |= held
        self.restarts += self.managed and (held or self.micro_batches > 0)
        if self.micro_batches:
            self._restarts_in_a_row += 1
            if self._restarts_in_a_row == RESTARTED:
                self._warn(RESTARTS, RESTARTED, self.accumulation_steps)
        self._take_backwards()
        self.micro_batches = self._unused_backwards = 0

    def warn_of_empty_step(self) -> None:
        """Warn of a ``step()`` without a backward since the last one."""
        self._warn(EMPTY_STEP)

    def _warn(self, text: str, *values: object) -> None:
        if self._warns and text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)
