"""What an engine keeps between the calls of its script: the accumulation window with the counters
of the run, the changes of its state, warnings about calls that fail in silence (non-finite
gradients, backwards without a step), and the interface of its measures.

[Note: read one step late]
Only the device knows whether a norm is finite, and the host does not wait for it. Rank 0 copies the
norm and its loss to host memory after the step, with an event, and reads them in a later step, once
the event is over. Only one copy is under way at a time: a host that runs far ahead of its device
may name a step after the first bad one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from hf_zero.device import kinds, pinned, spans, streams
from hf_zero.distributed.collective_log import PassTracker
from hf_zero.errors import NotBuiltError, PartitionError, UnmanagedWindowError
from hf_zero.logging import logger
from hf_zero.offload.unit_updates import UnitUpdates
from hf_zero.optim.segments import ParamGroup

if TYPE_CHECKING:
    from hf_zero.distributed.mesh import Mesh
    from hf_zero.zero.gather.shared_shards import SharedShards

# number of backwards: a step of one micro-batch may well add up the gradients of several losses
FORGOTTEN = 8
RESTARTED = 3  # windows restarted in a row, after which a script restarts all of them

Engine = TypeVar("Engine")


class StopRequests:
    """Requests to stop the job, from this rank and others; see :meth:`hf_zero.Engine.stop_on`.
    Without a feature that hears them there are none.
    """

    agreed = False  # all ranks stop
    asked = False  # this rank was asked

    def __init__(self, mesh: Mesh, shards: SharedShards):
        self._mesh = mesh
        self._shards = shards

    @property
    def received(self) -> list[int]:
        """Signals that this rank has received, of those it listens for."""
        return []

    def listen(self, *signals: int) -> None:
        """Listen for requests from now on; each of ``signals`` triggers one."""
        if signals:
            self.request()

    def request(self) -> None:
        """Ask all ranks to stop after one of the next steps."""
        raise NotBuiltError(
            "this package has no feature that stops all ranks after the same step; install hf-zero "
            "with the row stop_requests of its table of features, or save and end the script on "
            "all ranks"
        )

    def move(self, mesh: Mesh, shards: SharedShards) -> None:
        """Continue with the parts of an engine that was built again."""

    def end_step(self) -> None:
        """End a step, the same on all ranks: read whether they have agreed to stop."""

    def end_run(self, requests: torch.Tensor) -> None:
        """End a step of a pipeline. ``requests``: the sum over all ranks of :attr:`asked`."""

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers."""


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

    def uncount(self) -> None:
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


class StateChanges:
    """The change of an engine's state (a step, a load) under way.

    - An exception that breaks a change off leaves weights, optimizer state and counters that belong
      to different steps, possibly on this rank alone: whatever would use them is refused, until a
      load has replaced all of them.
    - With ``zero_optimization.update_in_backward`` the backward that closes a window makes its
      update. Inside that backward the model is half updated, and nothing may read or change it.
      From its end until ``step()`` the state is that after the step: readers have it, and
      :meth:`refuse_until_step` refuses what would act on this step in a plain loop.
    """

    def __init__(self, passes: PassTracker) -> None:
        self._passes = passes
        self.broken = ""  # the change that was broken off, and why
        self._under_way = ""
        self._updater: UnitUpdates | None = None
        # what ``step()`` has yet to confirm, of an update that a backward has made: the settings of
        # the optimizer's groups after it, and the error of a post hook of the optimizer
        self.unconfirmed: tuple[list[ParamGroup], Exception | None] | None = None

    def connect(self, updater: UnitUpdates) -> None:
        """Set ``updater``, which makes updates in backwards."""
        self._updater = updater

    @contextmanager
    def change(self, what: str, replaces: bool = False) -> Iterator[None]:
        """Context of a change, ``what`` in messages; ``replaces``: it replaces all of the state."""
        outer, self._under_way = self._under_way, what
        try:
            yield
        except BaseException as error:
            reason = str(error).partition("\n")[0][:200]
            cause = type(error).__name__ + (f" ({reason})" if reason else "")
            self.break_off(f"{what} was broken off by {cause}")
            raise
        finally:
            self._under_way = outer
        if replaces:
            self.broken, self._passes.refuse = "", None

    def break_off(self, cause: str) -> None:
        """Refuse every use of the state from now on, because of the first ``cause``."""
        self.broken = self.broken or cause
        self._passes.refuse = self.refuse

    def begin_load(self) -> None:
        """Drop what a backward has left for ``step()``, before a load. Of a half updated model only
        a load that replaces all of the state makes it usable again.
        """
        if self._updater is not None:
            if self._updater.backward_update is not None:
                self.break_off("a backward had updated a part of the model before a load")
            self._updater.drop_backward_update()
        self.unconfirmed = None

    def refuse(self, what: str) -> None:
        """Raise PartitionError for ``what``, which reads the state, if a change was broken off, or
        the model is half updated.
        """
        if self.broken:
            raise PartitionError(
                f"{what} would use a state that is half changed: {self.broken}. Load a whole "
                "checkpoint (engine.load_checkpoint), or destroy() the engine and resume with "
                "hf_zero.initialize(resume=...), on all ranks"
            )
        self.refuse_until_step(what, acts=False)

    def refuse_until_step(self, what: str, acts: bool = True) -> None:
        """Raise PartitionError for ``what`` if the model is half updated; if it ``acts`` on the
        update in a plain loop, also until ``step()`` confirms an update in the backward.
        """
        if self._updater is not None and self._updater.backward_update is not None:
            raise PartitionError(
                f"{what} comes inside a backward that has updated a part of the model already "
                "(zero_optimization.update_in_backward), or after an exception has broken it. Call "
                "it after the backward, or switch update_in_backward off; if an exception has "
                "broken the backward, load a checkpoint"
            )
        if acts and self.unconfirmed is not None:
            self.refuse_unconfirmed(what)

    def refuse_unconfirmed(self, what: str) -> None:
        """Raise PartitionError for ``what`` between an update in the backward and ``step()``."""
        if self.unconfirmed is not None:
            raise PartitionError(
                f"{what} comes after a backward that has updated the model already "
                "(zero_optimization.update_in_backward) and before its step(): without that key it "
                "would precede the update. Call step() first, or switch update_in_backward off; "
                "backwards before the last one of a step need "
                "engine.set_gradient_accumulation_boundary(False)"
            )

    def refuse_gradients(self, what: str) -> None:
        """Raise PartitionError for ``what`` of whole gradients inside a step, which divides them in
        place.
        """
        if self._under_way:
            raise PartitionError(
                f"{what} in a hook of {self._under_way}, which uses the gradients up; do it before "
                "optimizer.step(), or change the gradients of this rank's parts in a hook before "
                "the update: member.grad of each member of optimizer.param_groups"
            )

    def refuse_within(self, what: str) -> None:
        """Raise PartitionError for ``what`` inside a change."""
        if self._under_way:
            raise PartitionError(
                f"{what} in a hook of {self._under_way}, whose weights are changed and whose "
                "counters and schedule are not; call it after the step"
            )


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
