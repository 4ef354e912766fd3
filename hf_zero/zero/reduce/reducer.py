"""Reduction of gradients: units are reduced as they become complete, in one order on all ranks.

[Note: order of reductions]
In every backward that reduces, all ranks launch the reductions of all trainable units in one fixed
order (``reduction_order.py``). A unit waits for its predecessors; one that can get no more
gradients on this rank (:class:`RemainingForwards`) is launched at once, with zeros if it has none.
Units that all ranks leave out of the backward, and know it, are skipped.

[Note: what is over]
Autograd runs ready nodes in reverse order of creation, so a node runs after all nodes of its
backward that were created later. Each rank numbers entry and exit of unit forwards. Once a backward
reaches the output of a forward left at t, every forward of that graph entered after t is done;
forwards of another graph are not part of this backward. Forwards entered before t, of whatever
graph, may still follow.

Reentrant checkpointing runs a forward without a graph and reruns it inside the backward: such
forwards are counted (``UnitCalls.expected_reruns``) if checkpoints of that kind have been seen,
and in the first backward of each kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.logging import listed
from hf_zero.offload.unit_updates import GradientCopies
from hf_zero.zero.gather.unit import OutermostForward, Unit, UnitCall, unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradients import GradientBuffer, GradientMemory
from hf_zero.zero.layout.parameter_views import any_raw_grad, drop_raw_grads
from hf_zero.zero.layout.stage_policy import StagePolicy
from hf_zero.zero.reduce.idle_parameters import IdleParameters, zero_left_out
from hf_zero.zero.reduce.losses import AveragingFactors
from hf_zero.zero.reduce.reduction_order import BackwardObservations, ReductionOrder
from hf_zero.zero.reduce.reductions import (
    ReductionMessages,
    WindowSums,
    collect_gradients,
    grad_versions,
    mark_present,
    wire_buffers,
)
from hf_zero.zero.reduce.step_agreement import StepAgreement

if TYPE_CHECKING:
    from hf_zero.zero.gather.schedule import Schedule

NOT_BEGUN = 1 << 62  # the tick of no call


@dataclass(frozen=True)
class BackwardSettings:
    """Properties of the backward under way.

    weight: of the micro-batch, equal on all ranks. unscale: this rank's own factor, applied before
    the reduction. ends_window: this backward, outside no_sync, is known to end the accumulation
    window (stages 2 and 3 reduce in every backward). on_reduced: called with flat buffers of a unit
    to be updated together, whose last gradients of the window have been reduced. alone: no backward
    of the window precedes it. on_finished: called once all its reductions are issued.
    """

    weight: float = 1.0
    unscale: float = 1.0
    ends_window: bool = True
    on_reduced: Callable[[Sequence[FlatBuffer]], bool] | None = None
    alone: bool = False
    on_finished: Callable[[], None] | None = None


@dataclass(eq=False)
class BackwardProgress:
    """One backward. ``key`` identifies its kind, equal on all ranks."""

    key: Hashable = None
    under_way: bool = False
    units: Sequence[Unit] = ()  # units to reduce in it, in order
    next: int = 0  # index in ``units`` of the next reduction
    # length of the plan prefix that some rank may have to wait for before it can launch our latest
    # reduction
    depth: int = 0
    # units that became complete, with the versions of their gradients then, if this pass learns
    ready: dict[Unit, list[tuple[int, int] | None] | None] = field(default_factory=dict)
    reduced: set[FlatBuffer] = field(default_factory=set)
    updated: set[Unit] = field(default_factory=set)  # whose update has begun in it
    observed: BackwardObservations = field(default_factory=partial(BackwardObservations, False))
    # whether it is the first of its kind, or its gathers are recorded anew
    learns: bool = False


class RemainingForwards:
    """The forwards that the backward under way may still reach."""

    def __init__(self) -> None:
        self._tick = NOT_BEGUN  # calls entered at this tick or later have ended their backward
        # calls in backward without marks, whose end no hook reports
        self.unmarked: list[UnitCall] = []
        # stand-in for forwards recomputed in this backward
        self.recomputation: OutermostForward | None = None
        self.reruns_seen = False  # a checkpoint has run a backward inside a backward

    def begin(self, recomputation: OutermostForward) -> None:
        """Begin a backward."""
        self._tick, self.recomputation = NOT_BEGUN, recomputation
        self.unmarked.clear()

    def end(self) -> None:
        self._tick, self.recomputation = NOT_BEGUN, None
        self.unmarked.clear()

    def advance_to(self, tick: int) -> Sequence[Unit]:
        """Advance the backward to ``tick``; return units of unmarked calls that end by then."""
        if tick >= self._tick:
            return ()
        self._tick = tick
        units = list[Unit]()
        over, unmarked = list[UnitCall](), list[UnitCall]()
        for call in self.unmarked:
            (over if call.began >= tick else unmarked).append(call)
        self.unmarked = unmarked
        for call in over:
            if not self.awaits_calls(call.unit):
                units.append(call.unit)
        return units

    def awaits_calls(self, unit: Unit) -> bool:
        """Return whether the backward of a call of ``unit`` is pending or running."""
        # Several blocks may share a unit, and each of their calls asks: the call found last time
        # answers most of them.
        calls, reached, recomputation = unit.calls, self._tick, self.recomputation
        awaited = calls.awaited()
        if (
            awaited is not None
            and (awaited.began < reached or awaited.outermost is recomputation)
            and (awaited in calls.in_backward or awaited in calls.pending)
        ):
            return True
        last: UnitCall | None = None  # a backward reaches it last
        for candidates in (calls.in_backward, calls.pending):
            for call in candidates:
                may_come = call.began < reached or call.outermost is recomputation
                if may_come and (last is None or call.began < last.began):
                    last = call
        if last is None:
            return False
        calls.awaited = weakref.ref(last)
        return True

    def awaits_reruns(self, unit: Unit, learning: bool) -> bool:
        """Return whether a checkpoint may still rerun ``unit``.

        ``learning``: this backward is the first of its kind.
        """
        return unit.calls.expected_reruns > 0 and (learning or self.reruns_seen)

    def awaits(self, unit: Unit, learning: bool) -> bool:
        """Return whether ``unit`` may still get gradients."""
        return (
            bool(unit.calls.in_forward or unit.calls.read_by)
            or self.awaits_reruns(unit, learning)
            or self.awaits_calls(unit)
        )


class Reducer:
    """Launches the reductions of units in order as their gradients become complete, and ends those
    of a backward.

    ``offload`` copies offloaded gradients from a GPU to the host; None without such.
    ``wire_dtype``: dtype of messages; None: the parameters' own. ``kernels``: the configuration's.
    ``packed``: maximum number of elements of consecutive units in one message. ``keeps_buffers``:
    buffers of messages are kept between steps.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        policy: StagePolicy,
        agreement: StepAgreement,
        offload: GradientCopies | None,
        schedule: Schedule,
        *,
        averaging: AveragingFactors,
        wire_dtype: torch.dtype | None,
        kernels: str | tuple[str, ...],
        packed: int,
        keeps_buffers: bool,
    ):
        self._mesh, self._schedule = mesh, schedule
        self._order, self.remaining = ReductionOrder(units), RemainingForwards()
        flats = [flat for unit in units for flat in unit.flats]
        trainable = [flat for flat in flats if flat.trainable]
        self._members = [parameter for flat in flats for parameter in flat.members]
        self._frozen = [p for flat in flats if not flat.trainable for p in flat.members]
        # sharded gradients cannot stay whole
        self._reduces_every_backward = policy.shards_gradients
        self._wire_dtype, self._averaging = wire_dtype, averaging
        self._agreement, self._offload = agreement, offload
        self._buffers = wire_buffers(trainable)
        meshes = dict.fromkeys(flat.mesh for flat in trainable)
        dims = [dim for mesh in meshes for dim in (mesh.shard, mesh.replicate)]
        # freed before the update, which does not need them
        self._freed = [] if keeps_buffers else [self._buffers, *(dim.spare for dim in dims)]
        self._sums = WindowSums(self._buffers, offload)
        self._messages = ReductionMessages(
            mesh, self._sums, self._buffers, offload, kernels, packed, self._issue_gathers
        )
        self.idle = IdleParameters()
        self._left_some_out = False  # some backward of the window has left units out
        self._known: set[Hashable] = set()  # kinds of backward whose order is known
        self.progress = BackwardProgress()  # of the backward under way, or of the last one
        # length of the prefix of the plan of gathers that this rank may wait for; None: all of it
        self.reach: int | None = None
        # units left out of the backward under way that it uses after all: reduced last
        self._restored: set[Unit] = set()
        self.configure_backward(BackwardSettings())
        # since the last step or ``zero_grad``, an exception has broken a backward, and some of its
        # gradients are lost
        self.gradients_lost = False

    def configure_backward(self, settings: BackwardSettings) -> None:
        """Set ``settings`` for the next backward."""
        self._settings, averaging, weight = settings, self._averaging, settings.weight
        # of gradients that are sent now: before the message, and after its sum over the ranks
        self._factor_before_message = averaging.before(weight, on_the_wire=True) * settings.unscale
        self._factor_after_message = averaging.after(weight, on_the_wire=True)
        # of gradients that the window adds up: before that sum, and after its sum over the ranks
        self._factor_before_window = averaging.before(weight) * settings.unscale
        self._factor_after_window = averaging.after(weight)
        self._reduces_now = settings.ends_window or self._reduces_every_backward

    def begin(self, key: Hashable) -> None:
        """Begin a backward; ``key`` identifies its kind, equal on all ranks."""
        self.wait_for_offload()
        sharded = self._schedule.has_sharded_units
        self._mesh.passes.begin("backward", key, joint=self._reduces_now or sharded)
        learns = self._schedule.recording or key not in self._known
        self.progress = BackwardProgress(key, True, list(self._order.units), learns=learns)
        self._restored = set()
        self._limit_gathers()
        # A rank must not wait for a reduction that others launch only after a gather that this rank
        # has not joined yet.
        on_reduced = None if self._settings.on_reduced is None else self._update_reduced
        self._messages.begin(self.progress.learns and sharded, on_reduced)
        # more gradients will be added; an upcast copies nothing as long as none are held
        if not self._reduces_now:
            for flat in (flat for unit in self.progress.units for flat in unit.trainable_flats):
                self._sums.upcast(flat)

    def leave_out(self, units: frozenset[Unit]) -> None:
        """Leave ``units`` out of the backward under way: all ranks know that none uses them. Called
        before the first reduction.
        """
        # Other ranks may have gradients of earlier backwards, and this one none to show that.
        if self._reduces_every_backward or (self._reduces_now and self._settings.alone):
            self._left_some_out |= bool(units)
            self.progress.units = [unit for unit in self._order.units if unit not in units]
            self._limit_gathers()

    def restore_left_out(self, units: frozenset[Unit]) -> None:
        """Undo leaving out ``units``, which all ranks use after all: they are reduced last."""
        self._restored |= units

    def note_older_pending(self) -> None:
        """Record that the backward of an older forward is pending, which this one may go through:
        no unit counts as complete before its end.
        """
        self.progress.observed.older_pending = True
        self._messages.set_waits_jointly(self._schedule.has_sharded_units)
        self._limit_gathers()

    def mark_complete(self, unit: Unit) -> None:
        """Mark the gradients of ``unit`` as complete on this rank, as far as hooks can tell."""
        progress = self.progress
        if not unit.trainable_flats or unit in progress.ready or not progress.under_way:
            return
        progress.ready[unit] = grad_versions(unit) if progress.learns else None
        progress.observed.complete.append(unit.index)
        if progress.learns:
            progress.observed.issued[unit.index] = self._schedule.issued
        if not self._reduces_now:
            progress.observed.has_gradients |= self._sums.add(unit, self._factor_before_window)

    def take_next(self) -> Unit | None:
        """Return the next unit in order, to be launched; None if it may still get gradients on this
        rank, or if none is left.
        """
        progress, remaining = self.progress, self.remaining
        reduces = progress.under_way and self._reduces_now
        if not reduces or progress.next == len(progress.units):
            return None
        unit = progress.units[progress.next]
        if unit in self._order.reduced_last:
            return None
        awaits = remaining.awaits_reruns if unit in progress.ready else remaining.awaits
        if awaits(unit, progress.learns):
            return None
        progress.next += 1
        depth = self._order.depths.get(progress.key, {}).get(unit.index, 0)
        progress.depth = max(progress.depth, depth)
        self._limit_gathers()
        return unit

    def _limit_gathers(self) -> None:
        """Let this rank wait for no gather that others issue only after the next reduction."""
        progress, reach = self.progress, None
        depths = self._order.depths.get(progress.key)
        jointly = progress.learns or progress.observed.older_pending or not self._reduces_now
        coming = None if progress.next == len(progress.units) else progress.units[progress.next]
        if depths and not jointly and coming and coming not in self._order.reduced_last:
            reach = max(progress.depth, depths.get(coming.index, 0))
        self.reach = reach

    def launch(self, unit: Unit) -> None:
        """Take in the gradients of ``unit`` and send its reductions, together with those of the
        next units if they are small.
        """
        settings = self._settings
        if self._reduces_every_backward:
            if unit.streams.computing:
                unit.streams.wait_for_gradients()
        else:
            self.progress.observed.has_gradients |= self._sums.add(unit, self._factor_before_window)
        # the update of the unit may begin once its gradients are reduced
        if settings.on_reduced is not None:
            for flat in unit.trainable_flats:
                mark_present(flat)
            self._agreement.send(unit)
        for flat in unit.trainable_flats:
            if flat.gradient.accumulated_grad is not None:
                self._send_accumulated(flat)
                continue
            wire = self._buffers.acquire(
                flat.layout.padded, self._wire_dtype or flat.dtype, flat.full.device
            )
            used = collect_gradients(flat, wire, False, self._factor_before_message)
            flat.gradient.mark_used(used)
            self.progress.observed.has_gradients |= used > 0
            self._messages.send(flat, wire, wire, self._factor_after_message * flat.mesh.gain)
        if self._messages.waiting:
            units, at = self.progress.units, self.progress.next
            comes = at < len(units) and units[at] not in self._order.reduced_last
            self._messages.flush_unless_fits(units[at].trainable_flats if comes else ())

    def _send_accumulated(self, flat: FlatBuffer) -> None:
        if flat.gradient.stays_local:
            return
        accumulated = flat.gradient.accumulated_grad
        scale = self._factor_after_window * flat.mesh.gain
        assert accumulated is not None
        dtype = self._wire_dtype or flat.dtype
        encoded = flat.spec.reduce_codec is not None
        if dtype != accumulated.dtype and self._mesh.pp_stage_ranks > 1 and not encoded:
            wire = self._buffers.acquire(flat.layout.padded, dtype, flat.full.device)
            wire.copy_(accumulated)
            self._messages.send(flat, wire, wire, scale)
        else:
            self._messages.send(flat, accumulated, None, scale)

    def _update_reduced(self, flat: FlatBuffer) -> None:
        """Begin the update of ``flat`` once its gradients are reduced; offloaded flat buffers of a
        unit are updated together.
        """
        progress, unit = self.progress, unit_of(flat)
        progress.reduced.add(flat)
        together = unit.offloaded_flats if flat.optimizer_shard.offloaded else [flat]
        if (
            self._settings.on_reduced is None
            or not self._settings.ends_window
            or not progress.reduced.issuperset(together)
            or flat.spec.sharding.pp_stages  # their sum over stages is yet to come
            or (flat.gradient.offloaded and self._offload is not None and self._offload.is_adding)
        ):
            return
        self._agreement.receive(unit, together)
        # In the first backward of a kind more gradients may follow, unless all ranks have all.
        if progress.key not in self._known and not (
            self._settings.alone and self._agreement.all_ranks_have(unit)
        ):
            return
        if self._settings.on_reduced(together):
            progress.updated.add(unit)

    def _issue_gathers(self) -> None:
        """Issue the gathers that other ranks may wait for before they launch a reduction that this
        rank is about to wait for.
        """
        if self.progress.under_way:
            self._schedule.issue_through(self.progress.depth)

    @property
    def launched(self) -> int:
        """Number of reduction messages that this rank has sent in the backward under way."""
        return self._messages.sent if self.progress.under_way else 0

    def finish_beyond(self, number: int) -> None:
        """Wait for the oldest reductions in excess of those that may be in flight, among the first
        ``number`` messages, which all ranks have sent.
        """
        self._messages.finish_beyond(number)

    def note_unfinished(self) -> None:
        """Record, at the end of a backward, the units that could have got gradients until now."""
        progress, remaining = self.progress, self.remaining
        if progress.under_way and progress.learns:
            units = (unit for unit in progress.units[progress.next :] if unit not in progress.ready)
            progress.observed.unfinished = [
                unit.index for unit in units if remaining.awaits(unit, False)
            ]

    def finish(self, learns: bool = False) -> None:
        """Finish the backward, after all its gathers are issued: reduce the remaining units in
        order, and wait for all reductions.

        ``learns``: the order of gathers was recorded in this backward.
        """
        progress = self.progress
        if not progress.under_way:
            return
        learns = learns or progress.learns
        self._end_progress()
        left_out = set(self._order.units).difference(progress.units)
        for unit in self._order.units if left_out else ():
            # used after all: by a forward reached later, or through a penalty on the weights
            if unit in left_out and (
                unit in self._restored
                or any(any_raw_grad(flat.members) for flat in unit.trainable_flats)
            ):
                progress.units = [*progress.units, unit]
        if self._reduces_now:
            launched, waited = progress.units[: progress.next], progress.units[progress.next :]
            for unit in waited:
                before = progress.ready.get(unit)
                if before is not None and before != grad_versions(unit):
                    progress.observed.parts.append(unit.index)
            for unit in waited:
                progress.next += 1
                self.launch(unit)
            self._reduce_late(launched, learns)
            self._messages.finish()
            if self._agreement.sent or self._agreement.received:
                self._agreement.drop()
            for pool in self._freed if self._settings.ends_window else ():
                pool.clear()
        else:
            for unit in progress.units:
                progress.observed.has_gradients |= self._sums.add(unit, self._factor_before_window)
        self.idle.end_backward()
        if self._settings.ends_window:
            self._record_left_out()
        if self._settings.on_finished is not None:
            self._settings.on_finished()
        # those that require grad but are in no optimizer group: nothing would ever clear them
        if any_raw_grad(self._frozen):
            drop_raw_grads(self._frozen)

    def _end_progress(self) -> None:
        self.progress.under_way, self.reach = False, None
        self._messages.set_waits_jointly(False)

    def _reduce_late(self, launched: Sequence[Unit], learns: bool) -> None:
        """Reduce again the units among ``launched`` whose gradients arrived after their reduction,
        and learn the order of the next backward of this kind, if this one ``learns`` (collective).
        Raise PartitionError in a backward of a known kind, where they must not arrive late.
        """
        progress = self.progress
        late: list[Unit] = []
        if any_raw_grad(self._members):
            late = [
                u for u in launched if any(any_raw_grad(flat.members) for flat in u.trainable_flats)
            ]
        if late and progress.key in self._known:
            raise PartitionError(
                f"gradients of {[unit.label for unit in late]} came after their reduction had "
                "started, unlike in the first backward of this kind; compute what uses them "
                "outside their module after the forward, or from the first backward on (for "
                "example add `0 * p.sum()` to the loss)"
            )
        if not learns:
            return
        progress.observed.late = [unit.index for unit in late]
        progress.observed.has_gradients |= bool(late)
        observed = self._mesh.all_gather_object(progress.observed, "observations of a backward")
        self._launch_again({index for record in observed for index in record.late})
        # If an older forward is pending, units are not complete before the end: nothing to learn.
        if any(r.has_gradients for r in observed) and not any(r.older_pending for r in observed):
            self._known.add(progress.key)
            self._order.learn(progress.key, observed, self._schedule.depths_of_last_pass())
        else:
            self._known.discard(progress.key)  # its depths may be those of another plan

    def _launch_again(self, late: Set[int]) -> None:
        """Reduce the units with the indices ``late`` again, which some rank asks for. Raise
        PartitionError for a unit that this backward has updated.
        """
        updated = self.progress.updated
        if twice := [unit.label for unit in updated if unit.index in late]:
            raise PartitionError(
                f"gradients of {listed(sorted(twice), 6)} came after their update in the backward, "
                "from a backward inside it (a reentrant checkpoint): call torch's checkpoint with "
                "use_reentrant=False, or switch zero_optimization.update_in_backward off"
            )
        if late:
            self._messages.finish()  # what is on the wire must not change
        for unit in self._order.units:
            if unit.index in late:
                self.launch(unit)

    def _record_left_out(self) -> None:
        """Record idle and left-out parameters once the gradients of the window are reduced."""
        if self._left_some_out:
            zero_left_out(self._order.units)
            self._left_some_out = False
        self.idle.set_on_flats()

    def reduce_accumulated(self) -> None:
        """Reduce the gradients of backwards before the end of the window, none of which was
        declared its last (collective).
        """
        sent = False
        for unit in self._order.units:
            for flat in unit.trainable_flats:
                if flat.gradient.has_unreduced and not flat.gradient.stays_local:
                    self._send_accumulated(flat)
                    sent = True
        if sent:
            self._messages.finish()
            for pool in self._freed:
                pool.clear()
        if self._offload is not None:
            self._offload.finish_sums()
        self._record_left_out()

    @property
    def local_scale(self) -> float:
        """Factor from unreduced gradients to this rank's part of a mean over the ranks."""
        return self._factor_after_window * self._mesh.pp_stage_ranks

    def unreduced_scale(self, flat: FlatBuffer) -> float:
        """Return the factor that turns an averaged gradient of ``flat`` into a local one such that
        reducing it on every rank gives the average back.
        """
        return 1.0 / (flat.mesh.size * flat.mesh.gain * self._averaging.post)

    def wait_for_offload(self) -> None:
        """Wait until reduced gradients are in host memory, if they are offloaded."""
        if self._offload is not None:
            self._offload.wait()

    def begin_replay(self) -> None:
        """Begin a backward that is launched from a graph, like one without gathers."""
        self._mesh.passes.begin("backward", None, joint=self._reduces_now)

    def end_replay(self) -> None:
        """End it, with gradients taken in and reduced."""
        self.idle.end_backward()
        if self._settings.ends_window:
            self._record_left_out()

    def forget_buffers(self) -> None:
        """Free the buffers of messages, and end the messages that the host has yet to wait for:
        a graph neither uses memory from before it nor leaves its own behind.
        """
        self._buffers.clear()
        for dim in self._mesh.mesh_dims:
            dim.forget_buffers()

    def abort(self) -> None:
        """Abort the backward under way after an exception, and drop the gradients it left on the
        parameters.

        If it had produced any, or had begun a reduction, :attr:`gradients_lost` is set until
        :meth:`clear`: plain PyTorch would keep these gradients in ``.grad``.
        """
        progress = self.progress
        if progress.under_way:
            flats = (flat for unit in self._order.units for flat in unit.trainable_flats)
            has_gradients = any(any_raw_grad(flat.members) for flat in flats)
            if has_gradients or progress.ready or progress.next:
                self.gradients_lost = True
        self._drop()
        self._end_progress()

    def lose_gradients(self) -> None:
        """End the backward under way, whose end an exception has broken, and set
        :attr:`gradients_lost` until :meth:`clear`: some gradients are in no finished reduction.
        """
        self._end_progress()
        self.gradients_lost = True

    def clear(self, drop: Callable[[GradientBuffer], None] = GradientBuffer.clear) -> None:
        """Drop all gradients, those of each flat buffer by its method ``drop``."""
        self.gradients_lost = False
        self.idle.clear()
        self._drop()
        memories = set[GradientMemory | None]()
        for unit in self._order.units:
            for flat in unit.trainable_flats:
                drop(flat.gradient)
                memories.add(flat.gradient.memory)
        for memory in memories:
            if memory is not None:
                memory.set_allocated(False)

    def _drop(self) -> None:
        """Drop gradients on parameters and reductions on the wire."""
        self._messages.drop()
        if self._agreement.sent or self._agreement.received:
            self._agreement.drop()
        self.drop_stray_gradients()

    def drop_stray_gradients(self) -> None:
        """Drop gradients on parameters, which nothing has taken in."""
        if any_raw_grad(self._members):
            drop_raw_grads(self._members)

    def close(self) -> None:
        """Free everything: the engine is destroyed."""
        self.clear()
        self._buffers.clear()
        if self._offload is not None:
            self._offload.close()
