"""The accumulation window of a script, with the counters of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto

from hf_zero.errors import UnmanagedWindowError
from hf_zero.zero.step.window_warnings import (
    EMPTY_STEP,
    FORGOTTEN,
    WINDOW_IN_A_STEP,
    ZERO_GRAD_INSIDE,
    WindowWarnings,
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


class WindowEnd(Enum):
    """What ends a window."""

    STEP = auto()  # each step(), where accumulation is not managed: the value of a whole run
    COUNT = auto()  # its last micro-batch, by their number
    NEXT_BACKWARD = auto()  # the next backward, as the script has said
    LATER_BACKWARD = auto()  # a backward after the next one, as the script has said


class ZeroGradCalls(Enum):
    """When the script calls ``optimizer.zero_grad()``, as its micro-batches show."""

    UNKNOWN = auto()  # until the second micro-batch of the first window
    EACH_MICRO_BATCH = auto()  # after each, as it calls step(): inside a window they keep gradients
    OTHERWISE = auto()  # to the end of the run, once a micro-batch has followed another one without


class AccumulationWindow:
    """The micro-batches whose gradients one step uses: ``accumulation_steps`` of them, unless the
    script sets the end of a window. Not ``managed``: every step ends one. ``warns``: of events that
    repeat without an update.

    Its own methods alone set its attributes: each is an event, such as a backward that begins.
    """

    def __init__(self, accumulation_steps: int, managed: bool = True, warns: bool = False):
        # as the configuration and the script say
        self.accumulation_steps = accumulation_steps
        self.end = WindowEnd.COUNT if managed else WindowEnd.STEP
        self.syncs = True  # False inside no_sync
        # of the window: number of step() calls, or of backwards if not managed; the counters before
        # its first micro-batch was counted, None if a script has set the place in the window
        self.micro_batches = 0
        self._counters_before: Counters | None = None
        # Backwards of a managed window since the last step() or zero_grad(): each that leaves the
        # window open, as the script has said, is a micro-batch; those that may close it are one
        # together, and counted beside.
        self.backwards = self._closing_backwards = 0
        # since the last step(): a backward was called or a gradient written, even if no hook of the
        # model ran; zero_grad() has dropped one
        self._expects_gradients = self._was_dropped = False
        # of the run: windows that a step() has ended, and windows that had begun and were restarted
        self.updates = self.restarts = 0
        # forwards with gradients before the last step() that counted; None before the first
        self._forwards_at_step: int | None = None
        self._zero_grad_calls = ZeroGradCalls.UNKNOWN
        self._zeroed = False  # optimizer.zero_grad() was called since the last micro-batch
        # the counts before the last backward, as :meth:`undo_backward` sets them
        self._before_backward = (0, 0, 0, ZeroGradCalls.UNKNOWN)
        self._warnings = WindowWarnings(warns)

    @property
    def managed(self) -> bool:
        """Return whether not every step ends a window."""
        return self.end is not WindowEnd.STEP

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of micro-batches, from the next window on."""
        self.accumulation_steps = accumulation_steps

    def set_micro_steps(self, micro_steps: int) -> None:
        """Set the place in the window after ``micro_steps`` micro-batches in the whole run."""
        self.micro_batches = micro_steps % self.accumulation_steps
        self._counters_before = None

    def set_end(self, end: WindowEnd) -> None:
        """Set what ends the window, and those after it. Raises as :meth:`refuse_unmanaged`."""
        self.refuse_unmanaged("set_gradient_accumulation_boundary()")
        self.end = end

    def refuse_unmanaged(self, what: str) -> None:
        """Raise UnmanagedWindowError for ``what`` if every step ends a window."""
        if self.end is WindowEnd.STEP:
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
        without managed accumulation.
        """
        if self.end is WindowEnd.COUNT:
            return self.micro_batches + 1 >= self.accumulation_steps
        return self.end is WindowEnd.NEXT_BACKWARD

    @property
    def ends_by_step(self) -> bool:
        """Return whether a step now ends the window."""
        return self.end is WindowEnd.STEP or self.ends

    @property
    def next_backward(self) -> BackwardPlace:
        """The place in the window of a backward that begins now."""
        if not self.syncs or self.end is WindowEnd.LATER_BACKWARD:
            return BackwardPlace.INSIDE
        return BackwardPlace.LAST if self.ends else BackwardPlace.UNDECIDED

    def expect_gradients(self) -> None:
        """Record the call of a backward, or a gradient that a script writes."""
        self._expects_gradients = True

    def begin_backward(self, place: BackwardPlace, returns: bool = False) -> bool:
        """Count a backward that begins at ``place``, unless it ``returns`` its gradients and leaves
        none. Return whether it is the window's first.
        """
        is_first = self.micro_batches == self.backwards == 0
        counts = self.micro_batches, self.backwards, self._closing_backwards
        self._before_backward = *counts, self._zero_grad_calls
        if returns:
            return False
        if self.end is WindowEnd.STEP:
            self.micro_batches += 1
            return is_first
        if self.micro_batches and not self.backwards:
            self._compare_zero_grad_calls()
        if place is BackwardPlace.INSIDE:
            self.backwards += 1
            return is_first
        self.backwards += not self._closing_backwards
        self._closing_backwards += 1
        if self._closing_backwards > FORGOTTEN:
            self._warnings.check_backwards(self._closing_backwards, self.accumulation_steps)
        return is_first

    def _compare_zero_grad_calls(self) -> None:
        """Find out, as a micro-batch begins inside a window, how ``zero_grad()`` is called."""
        if not self._zeroed:
            self._zero_grad_calls = ZeroGradCalls.OTHERWISE
        elif self._zero_grad_calls is ZeroGradCalls.UNKNOWN:
            self._zero_grad_calls = ZeroGradCalls.EACH_MICRO_BATCH

    def undo_backward(self) -> None:
        """Take the last backward out of the counts: an exception has broken it."""
        *counts, self._zero_grad_calls = self._before_backward
        self.micro_batches, self.backwards, self._closing_backwards = counts

    @property
    def held_micro_batches(self) -> int:
        """Number of micro-batches whose gradients the next update will use, or whose update awaits
        its ``step()``.
        """
        return self.micro_batches + self.backwards

    def begin_step(self, is_updated: bool) -> bool:
        """Return whether a call of ``step()`` ends the window, and warn of one that should.
        ``is_updated``: it confirms an update in the backward.
        """
        ends_window = is_updated or self.end is WindowEnd.STEP or self.ends
        if not ends_window and self._closing_backwards == self.accumulation_steps:
            self._warnings.warn(WINDOW_IN_A_STEP, *[self.accumulation_steps] * 4)
        return ends_window

    # What a step() may find in place of a backward, each a weaker sign of a micro-batch than the
    # one before: a call of backward that no hook has seen, a forward, an earlier step.

    @property
    def awaits_backward(self) -> bool:
        """Return whether neither a backward nor a call of one, which no hook may have seen, has
        come since the last ``step()`` or ``zero_grad()``.
        """
        came = self.backwards or self._expects_gradients
        return not (came or (self.micro_batches and self.end is WindowEnd.STEP))

    def has_forward(self, forwards: int) -> bool:
        """Return whether the last of ``forwards``, those with gradients in the run, came after the
        last step, and no ``zero_grad()`` has dropped its gradients.
        """
        return forwards != (self._forwards_at_step or 0) and not self._was_dropped

    @property
    def lacks_backward(self) -> bool:
        """Return whether a step without a backward is an error, and not a call too many:
        ``zero_grad()`` has dropped the backward, or no step of the run has counted.
        """
        return self._was_dropped or self._forwards_at_step is None

    def warn_of_empty_step(self) -> None:
        """Warn of a ``step()`` without a backward since the last one."""
        self._warnings.warn(EMPTY_STEP)

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
        self.micro_batches, self._counters_before = 0, None
        self.updates += 1
        self._was_dropped, self._forwards_at_step = False, forwards
        return count

    def _take_backwards(self) -> int:
        """Return, and reset, the number of micro-batches since the last ``step()`` or
        ``zero_grad()``, at least 1; without managed accumulation, return that of the window.
        """
        count = self.micro_batches if self.end is WindowEnd.STEP else max(1, self.backwards)
        self.backwards = self._closing_backwards = 0
        self._expects_gradients = False
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
        self.micro_batches, self.backwards, self._closing_backwards = micro_batches, backwards, 1

    def counters_before(self, counters: Counters) -> Counters:
        """Return ``counters`` without the micro-batches that the window has counted."""
        if self.managed and self.micro_batches and self._counters_before is not None:
            return self._counters_before
        return counters

    def keeps_at_zero_grad(self) -> bool:
        """Record a call of ``optimizer.zero_grad()``. Return whether it keeps the window: inside
        one, from a script that calls it after every micro-batch, as it calls ``step()``.
        """
        if not (self.managed and self.micro_batches and self.awaits_backward):
            return False
        if self._zero_grad_calls is ZeroGradCalls.UNKNOWN and not self._zeroed:
            self._warnings.warn(ZERO_GRAD_INSIDE, self.micro_batches, self.accumulation_steps)
        self._zeroed = True
        return self._zero_grad_calls is not ZeroGradCalls.OTHERWISE

    def restart(self) -> None:
        """Begin another window: ``zero_grad()`` has dropped the gradients of this one."""
        held = not self.awaits_backward
        self._was_dropped |= held
        self.restarts += self.managed and (held or self.micro_batches > 0)
        if self.micro_batches:
            self._warnings.count_restart(self.updates, self.accumulation_steps)
        self._take_backwards()
        self.micro_batches = 0
