"""The update of offloaded state: unit by unit on a thread of its own, in the order in which the
next forward needs them.

[Note: exact and without staleness]
``engine.step`` returns while units are still being updated. Every user of a unit waits for its
update: a forward that reaches the unit (``schedule.ensure_gathered``), a gather, a reduction into
its gradient, and every access to its parameters, master weights or moments
(the leases of :class:`OptimizerShard`, of which the update holds one meanwhile; whole parameters
are :class:`UpdatingParameter` until then). The optimizer's groups are copied when the step begins,
so a scheduler may set the next learning rate at once. If the optimizer itself has to step, it does
so before ``engine.step`` returns.
"""

from __future__ import annotations

import heapq
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from hf_zero.device import kinds, streams
from hf_zero.device.spans import span
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import OffloadError
from hf_zero.offload.gradient_offload import GradientOffload
from hf_zero.offload.storage import Allocator
from hf_zero.offload.sub_group_update import SubGroupUpdate
from hf_zero.offload.unit_updates import UnitUpdates
from hf_zero.offload.update_gathers import Gather, UpdateGathers

if TYPE_CHECKING:
    from hf_zero.zero.gather.unit import Unit
    from hf_zero.zero.layout.flat_buffer import FlatBuffer


class OffloadedUpdater(UnitUpdates):
    """Update the ``units`` that have offloaded state. ``copies`` sends new parameters to a GPU,
    ``offload`` the gradients to the host.

    If parameters are whole and their state is sharded, ``mesh`` has a dimension for updates: their
    units are then also gathered, in one order on all ranks (``update_gathers.py``), before those
    of sharded parameters: every other collective waits for these gathers.
    """

    takes_offloaded = True

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        device: torch.device,
        copies: StagedCopies,
        offload: GradientOffload | None,
    ):
        super().__init__()
        self._all = list(units)
        self._watchdog = mesh.watchdog
        self._gathers: UpdateGathers | None = None
        if mesh.uncut.update_dim is not None:
            begin = partial(kinds.set_device, device)
            other_ranks = mesh.uncut.update_dim.other_ranks
            self._gathers = UpdateGathers(other_ranks, mesh.store_messages("updates"), begin)
            weakref.finalize(self, self._gathers.close)
            mesh.issue_before_others(self._gathers.issue_all)
        self._device = device
        self._copies = copies
        self._offload = offload
        self._pending: dict[Unit, tuple[Future[streams.Event | None], Gather | None]] = {}
        self._uses: list[Unit] = []  # units in the order of their first use since the last step
        self._queue = UpdateQueue(device)
        self._process = os.getpid()
        self.find_units()

    def find_units(self) -> None:
        units = [unit for unit in self._all if unit.offloaded_flats]
        self.units = sorted(units, key=lambda unit: bool(unit.sharded_flats))

    @property
    def pending(self) -> tuple[Unit, ...]:
        return tuple(self._pending)

    def used(self, unit: Unit) -> None:
        if unit in self.units and unit not in self._uses:
            self._uses.append(unit)
        unit.wait_for_update()

    def start(self, update: SubGroupUpdate) -> None:
        """Begin ``update``, in the order of first use since the last step, or of the model if units
        are gathered.
        """
        if self._gathers is None and self._uses:
            self.units = self._uses + [unit for unit in self.units if unit not in self._uses]
        self._uses = []
        order: list[Unit] = []
        unused: list[Unit] = []
        for unit in self.units:
            is_unused = all(flat.gradient.all_unused for flat in unit.offloaded_flats)
            (unused if is_unused else order).append(unit)
        if self.backward_update is update:
            started = self.units_updated_in_backward
            self.backward_update, self.units_updated_in_backward = None, []
            self._submit(update, [unit for unit in order if unit not in started])
        else:
            self.finish()
            self._submit(update, order)
        for unit in unused:  # other parameters of their groups make one more step than theirs
            for flat in unit.offloaded_flats:
                update.announce(flat.optimizer_shard)
        if self._gathers is not None:
            self._gathers.complete()

    def start_in_backward(self, update: SubGroupUpdate, unit: Unit) -> None:
        super().start_in_backward(update, unit)
        self._submit(update, [unit])

    def end_backward(self) -> None:
        if self._gathers is not None:
            self._gathers.end_backward()

    def _submit(self, update: SubGroupUpdate, units: Sequence[Unit]) -> None:
        """Begin ``update`` of ``units``: here if the optimizer itself steps, else on the thread."""
        units = self._first_two_by_arrival(units)
        events = self._uses_before()
        if events and self._gathers is not None:
            self._copies.open()
        for unit in units:
            for flat in unit.offloaded_flats:
                update.announce(flat.optimizer_shard)
        for at in range(update.rounds):
            for unit in units:
                self._prepare(update, unit, at, [*events, *self._copied_gradients(unit)])
            update.combine(at)
        for index, unit in enumerate(units):
            run = partial(self._run, update, unit, [*events, *self._copied_gradients(unit)])
            future: Future[streams.Event | None] = Future()
            if update.touches_optimizer:
                future.set_result(run())
                self._add(unit, future)
                self.finish(unit)
                continue
            self._add(unit, future)
            for flat in unit.offloaded_flats:
                flat.begin_update(partial(self.finish, unit), future)
            # The thread takes the waiting unit that the next forward needs first, or the oldest one
            # if all ranks gather.
            by_use = self._gathers is None and update is self.backward_update
            order = self.units.index(unit) if by_use else len(self.units) + index
            self._queue.submit(order, run, future)

    def _uses_before(self) -> list[streams.Event]:
        """Return the ends of the work of a GPU that was issued before an update, which may still
        read what that writes; [] where there is no GPU.
        """
        if kinds.is_synchronous(self._device):
            return []
        # earlier work may read the parameters until this event
        events = [streams.record_event(streams.current_stream(self._device))]
        beside = streams.shard_stream(self._device)
        if beside is not None:  # shards may be copied from the memory to be written until this one
            events.append(streams.record_event(beside))
        return events

    def _add(self, unit: Unit, future: Future[streams.Event | None]) -> None:
        """Register the update of ``unit``, whose result is ``future``, and its gather."""
        gather = None
        if self._gathers is not None:
            messages: dict[MeshDim, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for flat in unit.offloaded_flats:
                dim = flat.mesh.update_dim
                if dim is not None and not flat.sharded:
                    part = flat.full[flat.owned[0] : flat.owned[1]]
                    messages.setdefault(dim, []).append((flat.full, part))
            if messages:
                gather = self._gathers.add(
                    unit.label, list(messages.items()), future, self._copies.stream
                )
        self._pending[unit] = future, gather

    def _copied_gradients(self, unit: Unit) -> list[streams.Event]:
        """Return the ends of the copies of the gradients of ``unit`` to host memory."""
        offload = self._offload
        if offload is None:
            return []
        events = [offload.event(flat.gradient) for flat in unit.offloaded_flats]
        return [event for event in events if event is not None]

    def _first_two_by_arrival(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return ``units``, the first two swapped if the gradients of the first were sent to the
        host last: the thread then has work while they arrive. Unchanged where gathers fix the
        order.
        """
        if (
            self._gathers is not None
            or len(units) < 2
            or self._offload is None
            or self._offload.last not in [flat.gradient for flat in units[0].trainable_flats]
        ):
            return units
        return [units[1], units[0], *units[2:]]

    def finish(self, unit: Unit | None = None) -> None:
        for updated in [unit] if unit is not None else list(self._pending):
            if updated not in self._pending:
                continue
            if os.getpid() != self._process:  # a forked child has no such thread
                raise OffloadError(
                    f"{updated.label} is being updated in process {self._process}, whose forked "
                    "child cannot wait for it; read weights in the process that trains"
                )
            future, gather = self._pending[updated]
            # Only this wait is watched, not the waits of the threads: a rank waits for one thing.
            required = self._gathers.other_ranks if self._gathers is not None else ()
            pending = PendingCollective(f"the update of {updated.label}", required=required)
            with span("wait_update", updated.label), self._watchdog.watching(pending):
                copied = future.result()
                if copied is not None:
                    streams.current_stream(self._device).wait_event(copied)
                if self._gathers is not None and gather is not None:
                    self._gathers.wait(gather)
                updated.streams.record_gather()
            if self._pending.pop(updated, None) is not None:
                _end(updated, copied)

    def close(self) -> BaseException | None:
        failure: BaseException | None = None
        for unit in list(self._pending):
            try:
                self.finish(unit)
            except Exception as error:
                failure = failure or error
                del self._pending[unit]
                _end(unit, None)
        self._queue.close()
        if self._gathers is not None:
            self._gathers.close()
            self._gathers.join()
        return failure

    @torch.no_grad()
    def _prepare(
        self, update: SubGroupUpdate, unit: Unit, at: int, ready: Sequence[streams.Event]
    ) -> None:
        """Make round ``at`` of ``update`` of ``unit`` once the events ``ready`` are over."""
        for event in ready:
            event.synchronize()
        with span("prepare_update", unit.label):
            for flat in unit.offloaded_flats:
                update.prepare(flat.optimizer_shard, at)

    @torch.no_grad()
    def _run(
        self, update: SubGroupUpdate, unit: Unit, ready: Sequence[streams.Event]
    ) -> streams.Event | None:
        """Update ``unit`` once the events ``ready`` are over. Return the end of the copies of its
        new parameters to the device; None if there are none.
        """
        copies = self._copies
        for event in ready:
            event.synchronize()
        with span("update", unit.label):
            for flat in unit.offloaded_flats:
                output_for = partial(copies.output_for, flat)
                finish_output = partial(copies.finish_output, flat)
                update.run(flat.optimizer_shard, output_for, finish_output)
                flat.end_host_writes()
        return copies.record()


def _end(unit: Unit, copied: streams.Event | None) -> None:
    """End the update of ``unit``, whose new parameters are on the device after ``copied``."""
    for flat in unit.offloaded_flats:  # others may wait for the gather of their updated values
        flat.end_update(copied)


@dataclass(order=True)
class _Job:
    """A job; the smallest runs first."""

    order: int
    number: int
    run: Callable[[], streams.Event | None] = field(compare=False)
    future: Future[streams.Event | None] = field(compare=False)


class UpdateQueue:
    """Jobs for one thread, which the first job starts, working on ``device``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: list[_Job] = []  # a heap
        self._numbers = count()
        self._lock = threading.Lock()

    def submit(
        self,
        order: int,
        run: Callable[[], streams.Event | None],
        future: Future[streams.Event | None],
    ) -> None:
        """Queue ``run``; ``future`` gets its result or exception. Waiting jobs with less
        ``order`` run first, among equal ones the oldest.
        """
        if self._worker is None:
            begin = partial(kinds.set_device, self._device)
            self._worker = ThreadPoolExecutor(1, "hf-zero update", initializer=begin)
            weakref.finalize(self, self._worker.shutdown, wait=False)
        with self._lock:
            heapq.heappush(self._waiting, _Job(order, next(self._numbers), run, future))
        self._worker.submit(self._run_next)

    def _run_next(self) -> None:
        with self._lock:
            job = heapq.heappop(self._waiting)
        try:
            job.future.set_result(job.run())
        except BaseException as error:
            job.future.set_exception(error)

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None


# sub-groups being copied to a GPU at once: the small last one of a unit must not delay the next
STAGED = 3


class StagedCopies:
    """Host memory for the new elements of a sub-group, which are then copied to ``device``.

    ``allocator`` allocates memory that a GPU can copy from; ``largest`` is the maximum number of
    bytes of a sub-group's parameters. Used on the update thread.
    """

    def __init__(self, device: torch.device, largest: int, allocator: Allocator):
        self._device = device
        self._largest = largest
        self._allocator = allocator
        # the oldest first, each with the end of its copy
        self._staged: list[tuple[torch.Tensor, streams.Event | None]] = []
        self.stream: streams.Stream | None = None  # stream of the copies, created by the first

    def open(self) -> streams.Stream | None:
        """Return the stream of the copies, created at the first call."""
        if self.stream is None:
            self.stream = streams.side_stream(self._device, streams.Use.UPDATES)
        return self.stream

    def record(self) -> streams.Event | None:
        """Return an event at the end of the copies under way; None if there are none."""
        return streams.record_event(self.stream) if self.stream is not None else None

    def output_for(self, flat: FlatBuffer, start: int, stop: int) -> torch.Tensor | None:
        """Return host memory for the new elements ``[start, stop)`` of the parameter shard of
        ``flat``, in its dtype. Call :meth:`finish_output` once they are written.
        """
        memory = flat.shard_memory()
        if memory.device.type == "cpu":
            return memory[start:stop]
        self.open()
        if len(self._staged) < STAGED:
            memory = self._allocator(self._largest, torch.uint8)
        else:
            memory, copied = self._staged.pop(0)
            if copied is not None:
                copied.synchronize()
        self._staged.append((memory, None))
        return memory[: (stop - start) * flat.dtype.itemsize].view(flat.dtype)

    def finish_output(
        self, flat: FlatBuffer, start: int, stop: int, values: torch.Tensor | None
    ) -> None:
        """Copy ``values``, which have been written, unless the shard itself is in host memory."""
        if values is None or self.stream is None or flat.shard_memory().device.type == "cpu":
            return
        with streams.on_stream(self.stream), span("copy_to_device", flat.key, values.nbytes):
            flat.store_shard(values, start, waited=True)
            memory, _ = self._staged[-1]
            self._staged[-1] = (memory, self.record())
