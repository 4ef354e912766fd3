"""The update of what is offloaded: unit by unit on a thread of its own, in the order in which the
next forward needs them.

[Note: exact and without staleness]
``engine.step`` returns while units are still being updated. What needs a unit waits for its update:
a forward as it comes to the unit (``schedule.ensure_gathered``), a gather, a reduction into its
gradient, and anything that reads its parameters, masters or moments
(:meth:`OptimizerShard.wait_for_update`; whole parameters are :class:`UpdatingParameter` in
between). The optimizer's groups were copied when the step began, so that a scheduler may set the
next learning rate at once. Where the optimizer itself has to step, it does so before
``engine.step`` returns.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch

from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.gradient_offload import GradientOffload
from hf_zero.core.parameter import OwnedParameter, UpdatingParameter
from hf_zero.core.unit import Unit
from hf_zero.core.update_gathers import Gather, UpdateGathers
from hf_zero.device import kinds, streams
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.mesh import Mesh
from hf_zero.optim.piecewise import Update
from hf_zero.spans import span
from hf_zero.storage.base import Allocator

# pieces on their way to a GPU at once: the small last one of a unit must not hold up the next
STAGED = 3


@dataclass(order=True)
class _Task:
    """The update of one unit; the smallest is done first."""

    urgency: int
    number: int
    run: Callable[[], streams.Event | None] = field(compare=False)
    future: Future[streams.Event | None] = field(compare=False)


class Updater:
    """Updates the units that have offloaded state.

    ``allocator`` gives memory that a GPU can copy from.

    ``mesh`` has a dimension of updates where parameters are whole and their state is in chunks:
    units are then gathered as well, in the order of the model on all ranks
    (``update_gathers.py``).
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        device: torch.device,
        piece: int,
        allocator: Allocator,
        offload: GradientOffload | None = None,
    ):
        self._all = list(units)
        self._watchdog = mesh.watchdog
        self._gathers: UpdateGathers | None = None
        if mesh.updates is not None:
            begin = partial(kinds.set_device, device)
            self._gathers = UpdateGathers(mesh.updates, mesh.store_messages("updates"), begin)
            weakref.finalize(self, self._gathers.close)
            mesh.issue_before_others(self._gathers.issue_all)
        self._device = device
        self._piece = piece
        self._allocator = allocator
        self._offload = offload
        self._pending: dict[Unit, tuple[Future[streams.Event | None], Gather | None]] = {}
        self._uses: list[Unit] = []  # in the order of the forward under way
        self._worker: ThreadPoolExecutor | None = None
        self._stream: streams.Stream | None = None
        self._staged: list[tuple[torch.Tensor, streams.Event | None]] = []
        self.early: Update | None = None  # begun in the backward under way
        self._started: list[Unit] = []  # by it
        self._waiting: list[_Task] = []  # a heap
        self._numbers = count()
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Look which units have offloaded flats now."""
        self._units = [unit for unit in self._all if unit.offloaded]
        self._order = list(self._units)

    @property
    def pending(self) -> tuple[Unit, ...]:
        """Units whose update nobody has waited for yet."""
        return tuple(self._pending)

    @property
    def updated_early(self) -> Sequence[Unit]:
        """Units whose update has begun in the backward, and whose step is still to come."""
        return self._started if self.early is not None else ()

    def used(self, unit: Unit) -> None:
        """A forward needs ``unit`` now."""
        if unit in self._order and unit not in self._uses:
            self._uses.append(unit)

    def start(self, update: Update) -> None:
        """Begin ``update``, in the order of the last forward; where units are gathered, in that
        of the model.
        """
        if self._gathers is None and self._uses:
            self._order = self._uses + [unit for unit in self._order if unit not in self._uses]
        self._uses = []
        if self.early is update:
            self.early = None
            self._submit(update, [unit for unit in self._order if unit not in self._started])
        else:
            self.finish()
            self._submit(update, self._order)
        if self._gathers is not None:
            self._gathers.complete()

    def start_early(self, update: Update, unit: Unit) -> None:
        """Begin ``update`` with ``unit``, whose gradients have come while the backward goes on.
        :meth:`start` follows with the rest.
        """
        if self.early is not update:
            self.finish()
            self.early, self._started = update, []
        self._started.append(unit)
        self._submit(update, [unit])

    def drop_early(self) -> None:
        """The rest of what was begun in a backward will not follow: everything is going to be
        overwritten.
        """
        self.finish()
        self.early = None

    def _submit(self, update: Update, units: Sequence[Unit]) -> None:
        units = self._begun_at_once(units)
        events: list[streams.Event] = []
        if not kinds.is_host(self._device):
            # nothing reads the parameters any more
            events.append(streams.record_event(streams.current_stream(self._device)))
            beside = streams.shard_stream(self._device)
            # nor do shards leave the memory that is written
            events += [streams.record_event(beside)] if beside is not None else []
            if self._stream is None and self._gathers is not None:
                self._stream = streams.new_stream(self._device)
        for unit in units:
            for flat in unit.offloaded:
                update.announce(flat.optimizer_shard)
        if update.touches_optimizer:
            for unit in units:
                done: Future[streams.Event | None] = Future()
                done.set_result(self._run(update, unit, [*events, *self._landings(unit)]))
                self._add(unit, done)
                self.finish(unit)
            return
        if self._worker is None:
            begin = partial(kinds.set_device, self._device)
            self._worker = ThreadPoolExecutor(1, "hf-zero update", initializer=begin)
            weakref.finalize(self, self._worker.shutdown, wait=False)
        for place, unit in enumerate(units):
            future: Future[streams.Event | None] = Future()
            self._add(unit, future)
            _mark(unit, partial(self.finish, unit), future)
            # Of those that wait the thread takes the one that the next forward needs first; where
            # all ranks gather, the first that came.
            urgency = (
                self._order.index(unit)
                if self._gathers is None and update is self.early
                else len(self._order) + place
            )
            task = _Task(
                urgency,
                next(self._numbers),
                partial(self._run, update, unit, [*events, *self._landings(unit)]),
                future,
            )
            with self._lock:
                heapq.heappush(self._waiting, task)
            self._worker.submit(self._run_next)

    def _add(self, unit: Unit, future: Future[streams.Event | None]) -> None:
        """``unit`` is going to be updated, which ``future`` tells, and gathered."""
        gather = None
        if self._gathers is not None:
            owned = [(flat.full, *flat.owned) for flat in unit.offloaded]
            pairs = [(full, full[start:stop]) for full, start, stop in owned]
            gather = self._gathers.add(unit.label, pairs, future, self._stream)
        self._pending[unit] = future, gather

    def _landings(self, unit: Unit) -> list[streams.Event]:
        """What tells that the gradients of ``unit`` are in host memory."""
        if self._offload is None:
            return []
        found = [self._offload.event(flat.gradient) for flat in unit.offloaded]
        return [event for event in found if event is not None]

    def _begun_at_once(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """``units``, not begun with the one whose gradients are the last to come: that of a
        model's first unit, as a rule.
        """
        if (
            self._offload is None
            or self._gathers is not None
            or len(units) < 2
            or self._offload.last not in [flat.gradient for flat in units[0].trainable]
        ):
            return units
        return [units[1], units[0], *units[2:]]

    def finish(self, unit: Unit | None = None) -> None:
        """Wait for the update of ``unit``, or of all units. Raises what it has raised."""
        for each in [unit] if unit is not None else list(self._pending):
            if each not in self._pending:
                continue
            future, gather = self._pending[each]
            # The threads' own waits are not watched: what a rank waits for is one thing, and this
            # is it.
            needs = self._gathers.peers if self._gathers is not None else ()
            pending = PendingCollective(f"the update of {each.label}", needs=needs)
            with span("wait_update", each.label), self._watchdog.watching(pending):
                copied = future.result()
                self._wait_for(copied)
                if self._gathers is not None and gather is not None:
                    self._gathers.wait(gather)
            if self._pending.pop(each, None) is not None:
                _unmark(each, copied)

    def _wait_for(self, copied: streams.Event | None) -> None:
        if copied is not None:
            streams.current_stream(self._device).wait_event(copied)

    def close(self) -> BaseException | None:
        """Wait, and end the thread; returns what an update has raised, if one has."""
        failure: BaseException | None = None
        for unit in list(self._pending):
            try:
                self.finish(unit)
            except Exception as error:
                failure = failure or error
                del self._pending[unit]
                _unmark(unit)
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        if self._gathers is not None:
            self._gathers.close()
            self._gathers.join()
        return failure

    # ---- on the worker ----

    def _run_next(self) -> None:
        with self._lock:
            task = heapq.heappop(self._waiting)
        try:
            task.future.set_result(task.run())
        except BaseException as error:
            task.future.set_exception(error)

    @torch.no_grad()
    def _run(
        self, update: Update, unit: Unit, ready: Sequence[streams.Event]
    ) -> streams.Event | None:
        for event in ready:
            event.synchronize()
        with span("update", unit.label):
            for flat in unit.offloaded:
                update.run(
                    flat.optimizer_shard, partial(self._place, flat), partial(self._placed, flat)
                )
                flat.end_host_writes()
        return streams.record_event(self._stream) if self._stream is not None else None

    def _place(self, flat: FlatBuffer, start: int, stop: int) -> torch.Tensor | None:
        own = flat.part_in_host_memory(start, stop)
        if own is not None:
            return own
        if self._stream is None:
            self._stream = streams.new_stream(self._device)
        if len(self._staged) < STAGED:
            memory, left = self._allocator(self._piece * torch.float32.itemsize, torch.uint8), None
        else:
            memory, left = self._staged.pop(0)
        if left is not None:
            left.synchronize()
        self._staged.append((memory, None))
        return memory[: (stop - start) * flat.dtype.itemsize].view(flat.dtype)

    def _placed(self, flat: FlatBuffer, start: int, stop: int, values: torch.Tensor | None) -> None:
        if (
            values is None
            or self._stream is None
            or flat.part_in_host_memory(start, stop) is not None
        ):
            return
        with streams.on_stream(self._stream), span("copy_to_device", flat.key, values.nbytes):
            flat.store_part(start, values)
            memory, _ = self._staged[-1]
            self._staged[-1] = (memory, streams.record_event(self._stream))


def _mark(unit: Unit, finish: Callable[[], None], future: Future[streams.Event | None]) -> None:
    for flat in unit.offloaded:
        flat.optimizer_shard.begin_update(finish, future)
        if not flat.sharded:
            flat.handles.turn(OwnedParameter, UpdatingParameter)


def _unmark(unit: Unit, copied: streams.Event | None = None) -> None:
    for flat in unit.trainable:
        if flat.optimizer_shard.finish_update is not None:
            flat.optimizer_shard.end_update(copied)
            if not flat.sharded:
                flat.handles.turn(UpdatingParameter, OwnedParameter)
