"""The schedule of gathers and releases: recorded orders, prefetching, and agreement on gathers that
no order has yet.

[Note: passes]
Gathers happen in passes: a forward from the outermost module called, or a backward from its first
hook to its end. Each kind of pass (see :meth:`Schedule.begin`) has a plan, the order of its
gathers, and all ranks issue exactly that order, including units that this rank does not use. The
first pass of a kind is recorded: before every gather the ranks agree, so that a block used on only
one rank enters the plan of every rank. A gather that is not in the rest of a plan, or in the part
that this rank may wait for now (the note in reduction_order.py), is a fetch (the note in
consensus.py) if other ranks hold shards of the unit, and sends nothing if this rank holds all of
it.

A pass may leave out units that no rank uses in it, if all ranks know this before its first gather:
they keep their positions in its plan and are skipped there. If one is needed after all, it is
fetched.

A unit is released one unit late, when the next unit is needed: a block called twice in a row is not
gathered twice, and the last unit of a forward is still gathered when its backward begins.

[Note: prefetching]
A unit that is needed brings the next ones of the plan: their shards are read from files, and their
gathers launched, the first whatever its size, then up to :data:`MAX_PREFETCHED_UNITS` and a limit
in bytes. Other ranks count on it: by :func:`count_prefetched` they know how far a rank may be, and
issue as much before they wait for its reduction (the note in reduction_order.py). So
:func:`count_prefetched` and the end of :meth:`Schedule.ensure_gathered` must admit the same units;
``tests/zero/test_schedule.py`` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple, Protocol

from torch import nn

from hf_zero.distributed.mesh import Mesh
from hf_zero.zero.gather.merged_orders import merged
from hf_zero.zero.gather.shared_shards import SharedShards
from hf_zero.zero.gather.unit import GatherState, Unit, unit_of
from hf_zero.zero.layout.compute_copy import ChangedValues
from hf_zero.zero.layout.flat_buffer import FlatBuffer

_pins, _nbytes = attrgetter("guard.pins"), attrgetter("nbytes")
MAX_PREFETCHED_UNITS = 2  # beside the limit in bytes of the configuration


class Next(IntEnum):
    """What a rank proposes to do next while an order is recorded. Of the proposals of all ranks the
    largest is done: a gather that any rank needs comes before the end.
    """

    END_OF_PASS = 0
    GATHER = 1


def count_prefetched(sizes: Sequence[int], limit: int) -> int:
    """Return how many of the next units of a plan, with ``sizes`` in bytes, are prefetched at most;
    ``limit``: of their bytes. As the end of :meth:`Schedule.ensure_gathered`.
    """
    units = min(len(sizes), MAX_PREFETCHED_UNITS) if limit else 0
    while units > 1 and sum(sizes[:units]) > limit:
        units -= 1
    return units


class PassDepths(NamedTuple):
    """Numbers of gathers of a plan that a rank may have issued, with those that it prefetches."""

    of_units: dict[int, int]  # once it has needed a unit of the plan, by index
    after: Sequence[int]  # once it has issued 0, 1, 2... of the gathers that the pass has recorded
    whole: int  # once it has issued all


class ReductionsUnderWay(Protocol):
    """``Reducer`` (``reduce/reducer.py``), as gathers call it.

    ``reach``: length of the prefix of the plan that this rank may wait for, outside of which a unit
    is fetched (the note in reduction_order.py); None: the whole plan.
    """

    reach: int | None

    @property
    def launched(self) -> int: ...

    def finish_beyond(self, number: int) -> None: ...


@dataclass(eq=False)
class Pass:
    """One pass. ``plan`` is the order of its gathers, None while they are recorded. ``left_out``:
    units that no rank uses in it.
    """

    key: Hashable
    backward: bool
    plan: list[Unit] | None
    left_out: frozenset[Unit] = frozenset()
    cursor: int = 0  # number of gathers of the plan issued so far
    record: list[Unit] = field(default_factory=list)


class Schedule:
    """The gathers and releases of one engine. :meth:`connect` completes it, before the first pass:
    without it these three attributes are missing.

    Others read ``gathered_for_others`` (``BackwardTracker``) and ``shards``, and add changes to
    ``changed_values``; only this class sets its attributes.
    """

    _reducer: ReductionsUnderWay
    abort_broken_backward: Callable[[], None]
    _on_use: Callable[[Unit], None] | None

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        shards: SharedShards,
        ahead_bytes: int,
        reads_ahead: int = 0,
        before_rounding: Sequence[Callable[[], None]] = (),
    ):
        """``ahead_bytes``: limit of prefetched bytes. ``reads_ahead``: number of units whose shards
        are read from files before their gather. ``before_rounding`` is called ahead of the gathers
        of a pass, for codecs that depend on the values of all ranks (collective; waits).
        """
        self._units = list(units)
        self._sharded = [unit for unit in units if unit.sharded_flats]
        self._mesh = mesh
        self._ahead_bytes, self._reads_ahead = ahead_bytes, reads_ahead
        self.changed_values = ChangedValues()
        self.has_sharded_units = bool(self._sharded)
        self.shards = shards
        self._plans: dict[Hashable, list[Unit]] = {}
        self._former_plans: dict[Hashable, list[Unit]] = {}  # while they are recorded anew
        self._pass: Pass | None = None  # None between passes, and in passes without gathers
        self._in_backward = False  # the pass under way, or the last one, is a backward
        # the last pass to issue all its gathers: its plan is complete
        self._last_complete = Pass(None, False, [])
        self._to_release: list[Unit] = []
        self._prefetched: list[Unit] = []
        # units gathered only for other ranks so far, with their positions in the plan
        self.gathered_for_others: list[tuple[int, Unit]] = []
        self._kept_units: list[Unit] = []  # for the backward that may follow
        self.before_rounding = tuple(before_rounding)

    def connect(
        self,
        reducer: ReductionsUnderWay,
        abort_broken_backward: Callable[[], None],
        on_use: Callable[[Unit], None] | None,
    ) -> None:
        """Set what the passes of an engine need of its backward and its step. Called once, before
        the first pass.

        ``abort_broken_backward`` aborts a backward that an exception has left open: what a script
        reads or writes then is outside passes, in exact values. ``on_use`` is called with each unit
        when it is needed, and waits for its update; None if no update outlasts its step.
        """
        self._reducer = reducer
        self.abort_broken_backward = abort_broken_backward
        self._on_use = on_use

    def depths_of_last_pass(self) -> PassDepths:
        """Return the depths in the plan of the last pass to issue all its gathers."""
        plan = self._last_complete.plan or []
        sizes = list(map(_nbytes, plan))

        def with_prefetched(needed: int) -> int:
            return needed + count_prefetched(sizes[needed:], self._ahead_bytes)

        positions = [0]
        for unit in self._last_complete.record or plan:  # a subsequence of the plan
            positions.append(plan.index(unit, positions[-1]) + 1)
        of_units = {unit.index: with_prefetched(number) for number, unit in enumerate(plan, 1)}
        return PassDepths(of_units, list(map(with_prefetched, positions)), len(plan))

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the sharded units that are whole on every rank at the start of a pass: pinned,
        or kept by the pass before.

        A rank that fetched a unit outside the plan may hold more; these must not be part of the
        key.
        """
        kept = self._kept_units
        return tuple([unit.index for unit in self._sharded if unit.guard.pins or unit in kept])

    def begin(
        self,
        kind: tuple[Hashable, ...],
        backward: bool = False,
        left_out: frozenset[Unit] = frozenset(),
    ) -> None:
        """Begin a pass.

        ``kind`` must be the same on all ranks; together with the resident units it selects the
        plan. ``left_out``: units that no rank uses in this pass. Equal on all ranks. Collective if
        codecs agree on scales before the pass (``before_rounding``).
        """
        self._in_backward = backward
        if not self.has_sharded_units:
            return
        if not backward:
            if all(map(_pins, self._sharded)):
                # No gathers and so no agreement: ranks may run different numbers of such forwards,
                # which change nothing that selects a plan.
                self._pass = None
                return
            self._kept_units = []
            self._release_unused()
            for unit in self._sharded:
                if unit.source is not None:
                    unit.source.forget()
        key = (*kind, self.resident)
        self._pass = Pass(key, backward, self._plans.get(key), left_out)
        if not backward:
            self._mesh.passes.begin("forward", key)
        for agree in self.before_rounding:
            agree()

    def leave_out(self, units: frozenset[Unit]) -> None:
        """Leave ``units`` out of the backward under way: all ranks know that none uses them. Called
        before the first gather by a plan.
        """
        if self._pass is not None:
            self._pass.left_out = units

    def issue_rest(self) -> None:
        """Issue the gathers that other ranks may still need in this pass, without waiting for
        them, and complete the plan of a pass that records one. The pass stays open until
        :meth:`end`.
        """
        under_way = self._pass
        if under_way is None:
            # without gathers: what the pass before has left is not this one's
            self._last_complete = Pass(None, False, [])
            return
        if under_way.plan is None:
            while self._agree_on_gather(Next.END_OF_PASS, None):
                pass
            # Units that no rank used in this pass keep their positions, since they may be used
            # again: a fetch of a unit outside the plan is slow.
            sign = -1 if under_way.backward else 1
            left_out = [[unit] for unit in self._sharded if unit in under_way.left_out]
            former = self._former_plans.get(under_way.key, ())
            plan = merged([under_way.record, former, *left_out], lambda unit: sign * unit.index)
            under_way.plan = self._plans[under_way.key] = plan
            under_way.cursor = len(plan)
        else:
            self.issue_through(len(under_way.plan))
        self._last_complete = under_way

    def end(self, keep_last: bool) -> None:
        """Finish the pass: issue the rest of the plan, then release.

        ``keep_last``: keep the root and the last unit for the backward that may follow.
        """
        if self.changed_values.used:
            self.changed_values.end()
        under_way = self._pass
        if under_way is None:
            # a backward, which ``Reducer.begin`` has begun; ``issue_rest`` has been called in it
            self._mesh.passes.end()
            return
        self.issue_rest()
        self._mesh.passes.end()
        assert under_way.plan is not None
        self._kept_units = []
        if keep_last:
            self._kept_units.append(self._units[0])
            if under_way.plan and under_way.plan[-1] not in under_way.left_out:
                self._kept_units.append(under_way.plan[-1])
        self._pass = None
        self._release_unused()

    def issue_through(self, count: int) -> None:
        """Issue the first ``count`` gathers of the plan, if there is one, including all messages
        that other ranks need from this one.
        """
        under_way = self._pass
        if under_way is None or under_way.plan is None:
            return
        while under_way.cursor < count:
            unit = under_way.plan[under_way.cursor]
            if unit not in under_way.left_out:
                self.gathered_for_others.append((under_way.cursor, unit))
                if unit in self._to_release and not unit.in_use:  # else this waits for the gather
                    self._to_release.remove(unit)
                    unit.release()
                unit.launch_gather(backward=under_way.backward)
            under_way.cursor += 1
        if self._mesh.shard.gathers_in_stages:
            prefetched = under_way.plan[count : under_way.cursor]
            ahead = sum(unit not in under_way.left_out for unit in prefetched)
            self._mesh.shard.advance_gathers(ahead)

    def release_skipped(self, through: int, awaits: Callable[[Unit], bool]) -> None:
        """Release units among the first ``through`` of the plan that were gathered only for other
        ranks, unless ``awaits(unit)``: this backward still needs them.
        """
        remaining = []
        later = {unit for position, unit in self.gathered_for_others if position >= through}
        for position, unit in self.gathered_for_others:
            if unit in later or awaits(unit):
                remaining.append((position, unit))
                continue
            free = not unit.in_use and unit not in self._kept_units
            if free and unit.state is GatherState.GATHERING:
                unit.release()
        self.gathered_for_others = remaining

    @property
    def issued(self) -> int:
        """Number of gathers that the pass under way has issued."""
        under_way = self._pass
        if under_way is None:
            return 0
        return len(under_way.record) if under_way.plan is None else under_way.cursor

    @property
    def recording(self) -> bool:
        """Return whether the pass under way agrees on every gather with the other ranks."""
        under_way = self._pass
        return under_way is not None and under_way.plan is None and self._mesh.pp_stage_ranks > 1

    def record_forward_error(self, error: BaseException | None) -> None:
        """Record, for the other ranks, the exception of a forward; None after a successful one."""
        self._mesh.passes.record_last_error(error)

    def abort(self) -> None:
        """Abort the pass under way after an exception, and release the units that no pass uses."""
        if self.changed_values.used:
            self.changed_values.end()
        self._mesh.passes.broke()
        self._pass, self._kept_units = None, []
        self._release_unused()

    def ensure_gathered(
        self, unit: Unit, module: nn.Module | None = None, for_script: bool = False
    ) -> None:
        """Gather ``unit``, with the values of the last step, and wait until it is whole on this
        rank, for the running ``module``; ``for_script``: no module computes with the values. In a
        pass with a plan, release units that were needed before, and prefetch the next ones.
        """
        if self._on_use is not None:
            self._on_use(unit)
        if not unit.sharded_flats:
            if self.changed_values.on and not for_script:
                self.changed_values.use(unit.flats, not self._in_backward)
            return
        if unit in self._to_release:
            self._to_release.remove(unit)
        if unit.state is not GatherState.GATHERED:
            for other in self._to_release:
                if not other.in_use:
                    other.release()
            self._to_release = []
        if unit.state is GatherState.RELEASED and self._await_turn(unit):
            unit.launch_gather(backward=self._in_backward)
        unit.finish_gather()
        if self.changed_values.on and not for_script:
            self.changed_values.use(unit.flats, not self._in_backward)
        unit.guard.module_runs(module)
        if unit in self._prefetched:
            at = self._prefetched.index(unit)
            if at:  # units gathered before it are not needed, or not in this order
                self._note_unneeded(self._prefetched[:at])
            del self._prefetched[: at + 1]
        under_way = self._pass
        if under_way is None or under_way.plan is None:
            return
        # Prefetch: read shards from files, and launch the next gathers of the plan, here and not in
        # a method, which would be a call for each unit of a pass.
        plan = under_way.plan
        for coming in plan[under_way.cursor : under_way.cursor + self._reads_ahead]:
            if coming.state is GatherState.RELEASED and coming not in under_way.left_out:
                for flat in coming.sharded_flats:
                    flat.prefetch()
        if not self._ahead_bytes:
            return
        waiting = sum(map(_nbytes, self._prefetched))
        end = len(plan) if self._reducer.reach is None else self._reducer.reach
        while under_way.cursor < end and len(self._prefetched) < MAX_PREFETCHED_UNITS:
            coming = plan[under_way.cursor]
            if coming in under_way.left_out:
                under_way.cursor += 1
                continue
            # as :func:`count_prefetched` tells other ranks
            if coming.state is not GatherState.RELEASED or (
                self._prefetched and waiting + coming.nbytes > self._ahead_bytes
            ):
                return
            under_way.cursor += 1
            coming.launch_gather(backward=under_way.backward)
            self._prefetched.append(coming)
            waiting += coming.nbytes

    def _await_turn(self, unit: Unit) -> bool:
        """Issue the gathers of the plan before that of ``unit``, which is released, and return
        whether its own is to be launched now. Without a turn in a plan it is fetched from the other
        ranks, or launched here as all of them agree.
        """
        under_way = self._pass
        if under_way is not None and under_way.plan is not None:
            awaited = under_way.plan[under_way.cursor : self._reducer.reach]
            if unit in awaited and unit not in under_way.left_out:
                if self._prefetched:
                    self._note_unneeded(self._prefetched)
                    self._prefetched = []
                self.issue_through(under_way.plan.index(unit, under_way.cursor))
                under_way.cursor += 1
                return True
            if unit.needs_no_peer:  # this rank holds all of it
                return True
            if self._mesh.consensus is not None:
                # outside the plan, or of its part for which this rank may not wait yet
                self.shards.fetch(unit)
                return False
        # recording, or no pass: agree on gathers until this unit is the one chosen
        while unit.state is GatherState.RELEASED:
            self._agree_on_gather(Next.GATHER, unit)
        return False

    def release_later(self, unit: Unit) -> None:
        """Mark the sharded ``unit`` as unused: it is released when the next unit is needed."""
        if not unit.calls.in_forward and not unit.calls.in_backward:
            unit.guard.module_ended()
            if not unit.in_use and unit not in self._to_release:
                self._to_release.append(unit)

    def pin(self, unit: Unit) -> None:
        """Keep ``unit`` whole until :meth:`unpin`. All ranks must pin together; an exception leaves
        the unit unpinned.
        """
        self.abort_broken_backward()
        gathered = bool(unit.sharded_flats) and unit.state is not GatherState.RELEASED
        current = unit in self._kept_units and not unit.is_rounded
        if self._pass is None and not unit.guard.pins and gathered and not current:
            # It is gathered only on this rank (by a graph that is still alive, say): the other
            # ranks need this one to join their gather. Or its values are rounded.
            self._agree_on_gather(Next.GATHER, unit)
        self.ensure_gathered(unit, for_script=True)
        unit.guard.pins += 1

    def unpin(self, unit: Unit) -> None:
        """Undo one :meth:`pin`, and release ``unit`` if nothing else uses it."""
        unit.guard.pins -= 1
        if unit.sharded_flats and not unit.in_use:
            unit.release()

    @property
    def between_passes(self) -> bool:
        """Return whether no pass with gathers is under way."""
        return self._pass is None

    def _note_unneeded(self, units: Sequence[Unit]) -> None:
        """Record prefetched units that were not needed at their turn."""
        if self._pass is not None and self._pass.plan is not None:
            issued = self._pass.plan[: self._pass.cursor]
            self.gathered_for_others += [
                (len(issued) - 1 - issued[::-1].index(unit), unit) for unit in units
            ]

    def end_step(self) -> None:
        """End a step. If a rank left its plan in this step, drop all plans and record again."""
        if self._mesh.consensus is not None and self._mesh.consensus.steps.end_step():
            self._former_plans.update(self._plans)
            self._plans.clear()

    def refresh(
        self,
        stale: Sequence[FlatBuffer],
        chosen: Sequence[FlatBuffer],
        written: frozenset[str] = frozenset(),
        after_step: bool = False,
    ) -> None:
        """Cast the master weights of ``stale`` into their shards, then gather the whole ones of
        these flat buffers, and the units of ``chosen`` that a pin or the pass before keeps
        (collective). Other units of ``chosen`` are released.

        The shards of flat buffers with keys in ``written`` are up to date already.
        ``after_step``: all ranks have the values of the step before, so flat buffers that send
        differences may do so; on a GPU the next reader of a whole parameter waits for its gather.
        """
        self.shards.store_masters(stale, written, after_step)
        resident = frozenset(self.resident)
        for unit in dict.fromkeys(map(unit_of, chosen)):
            if unit.index in resident:
                # it stays whole across the step on every rank, but its values are old
                for agree in () if unit.guard.pins else self.before_rounding:
                    agree()
                unit.launch_gather(exact=unit.guard.pins > 0)
                unit.finish_gather()
            else:
                # A graph that this rank has not dropped yet keeps it gathered with the old values;
                # other ranks may have released it.
                unit.release(keep_views=True)

    def _agree_on_gather(self, wanted: Next, unit: Unit | None) -> bool:
        """Agree with the other ranks on what is next, where this rank wants a gather of ``unit``,
        or the end of the pass. Launch the gather and, in a pass, record it; return False once all
        ranks are at the end. Outside passes a rank that is alone fetches ``unit``.
        """
        under_way = self._pass
        backward = under_way is not None and under_way.backward
        # among gathers the first unit in model order in a forward, the last in a backward
        sign = 1 if backward else -1
        proposal = (wanted, sign * unit.index if unit is not None else -len(self._units) - 1)
        consensus, agreed = self._mesh.consensus, proposal
        if consensus is not None:
            gathers, where = consensus.gathers, self._describe_pass()
            if under_way is None and unit is not None:
                reply = gathers.agree_or_leave(where, proposal, self._describe_proposal)
                if reply is None:
                    self.shards.fetch(unit, outside_passes=True)
                    return True
            else:
                launched = self._reducer.launched
                reply = gathers.agree(where, proposal, self._describe_proposal, launched)
            agreed = Next(reply[0]), reply[1]
            self._reducer.finish_beyond(gathers.all_launched)
        if agreed[0] is Next.END_OF_PASS:
            return False
        chosen = self._units[abs(agreed[1])]  # an index with the sign of its pass
        # outside passes the gather is for a script or a checkpoint, with exact values
        chosen.launch_gather(exact=under_way is None, backward=backward)
        self._mesh.shard.advance_gathers()  # all ranks have issued it, or are about to
        if under_way is not None:
            under_way.record.append(chosen)
        return True

    def _describe_pass(self) -> str:
        if self._pass is None:
            return "a gather outside forward and backward"
        return f"{'backward' if self._pass.backward else 'forward'} {self._pass.key!r}"

    def _describe_proposal(self, proposal: tuple[int, int]) -> str:
        wanted, index = proposal
        return f"gather of {self._units[abs(index)].label}" if wanted else "end of the pass"

    def _release_unused(self) -> None:
        """Release the units that neither a user nor the backward that may follow reads."""
        for unit in self._sharded:
            if unit.state is GatherState.RELEASED:
                continue
            if not unit.in_use and unit not in self._kept_units:
                unit.release()
        self._to_release, self._prefetched, self.gathered_for_others = [], [], []
