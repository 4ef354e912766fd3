"""Which backward is under way, how far it has come, and what of the model it may still reach.

[Note: graph tasks]
torch numbers backwards under way. The first hook that a backward reaches makes it known here, and
queues a callback for its end; one that an exception ends drops its callback instead. A backward
inside a backward is reentrant checkpointing and belongs to the outer one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from hf_zero.device import spans
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.layout.unit import RootForward, Unit, UnitForward
from hf_zero.zero.reduce.gradient_reducer import GradientReducer
from hf_zero.zero.reduce.reduction_order import Outstanding

FORWARDS_TOLD_APART = 4  # more forwards of one kind before a backward share a plan

graph_task = torch._C._current_graph_task_id  # of the backward that this thread runs, or -1


def keep_for_backward(unit: Unit, root: RootForward) -> None:
    """The backward of ``root`` reads ``unit`` where no hook of the unit tells when."""
    root.reads.add(unit)
    unit.forwards.pinned_by.add(root)


class BackwardTracker:
    """The backward of one engine's model: gathers what it reads, and tells ``reducer`` which units
    are complete.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        reducer: GradientReducer,
        on_begin: Callable[[], None],
        on_part: Callable[[], None],
    ):
        """``on_begin`` is called before a backward, ``on_part`` where it reaches a part of the
        model that was called alone.
        """
        self._units = list(units)
        self._schedule = schedule
        self._reducer = reducer
        self._on_begin, self._on_part = on_begin, on_part
        self.outstanding = Outstanding()
        # graph tasks under way, outermost first, and their callbacks
        self.tasks: list[tuple[int, weakref.ref[Any]]] = []
        # forwards since the last backward, by kind; None: those that one rank may have run alone
        self._forwards: Counter[Hashable] = Counter()
        self._first = False  # no call of the backward under way has been reached
        self._older: weakref.WeakSet[RootForward] = weakref.WeakSet()  # forwards with a graph
        # forwards that the backward under way goes back through
        self._reached: set[RootForward] = set()
        # The forward whose backward has come last to a call of it.
        self.reached: RootForward | None = None
        # units that the forwards reached by the backward under way have all left out
        self._left_out: frozenset[Unit] = frozenset()
        # forwards that no hook tells of: any backward may be theirs
        self._untracked: list[RootForward] = []
        reducer.connect(schedule, self.outstanding)
        schedule.reductions = reducer

    @property
    def under_way(self) -> bool:
        """Whether a backward has begun that neither its end nor an exception has ended."""
        return bool(self.tasks) and self.tasks[0][1]() is not None

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward since the last backward has left a graph, as far as known."""
        calls = (unit.forwards for unit in self._units)
        return bool(self._forwards or self._untracked) or any(
            each.pending or each.pinned_by for each in calls
        )

    # ---- forwards ----

    def add_forward(self, kind: Hashable, joint: bool) -> None:
        """A forward of ``kind`` with a graph begins; ``joint``: all ranks run it together."""
        self._forwards[kind if joint else None] += 1

    def add_call(self, call: UnitForward) -> None:
        """``call``, which has ended, has outputs whose hooks tell of its backward."""
        if not call.outer.tracked:
            call.outer.tracked = True
            self._older.add(call.outer)
        call.outer.calls.add(call)
        call.unit.forwards.pending.add(call)

    def end_forward(self, root: RootForward, has_graph: bool) -> None:
        """The outermost module called returns or raises; what ``root`` keeps gathered without a
        hook is bounded.
        """
        if not has_graph:
            self._unpin({root})
        elif not root.tracked and any(root in each.forwards.pinned_by for each in self._units):
            self._untracked.append(root)
            self._unpin(set(self._untracked[:-FORWARDS_TOLD_APART]))
            del self._untracked[:-FORWARDS_TOLD_APART]

    # ---- the backward of a call ----

    def reach_outputs(
        self, call: UnitForward, module: nn.Module, marks: Sequence[Node], grads: Any
    ) -> None:
        """A hook of an output of ``call``, which ``module`` has returned: its backward comes.

        ``marks`` are those of its inputs.
        """
        self.enter()
        if call not in call.unit.forwards.in_backward:
            self._start(call, marks)
        elif not call.unit.sharded:
            return
        self._schedule.ensure_gathered(call.unit, module)
        if spans.logs:
            spans.ended(call)
            spans.began(call, "backward", call.unit.name_of(module))

    def _start(self, call: UnitForward, marks: Sequence[Node]) -> None:
        if torch.is_grad_enabled() and call.unit.sharded:
            raise PartitionError(
                "create_graph=True at stage 3: the second backward would read weights of "
                f"{call.unit.label} that the first has released; "
                "use stage 2 for losses with gradients of gradients"
            )
        outer = call.outer
        if outer is not self.reached and outer is not self.outstanding.recomputation:
            self._leave_out(outer.left_out)
            self._reducer.idle.reach(outer.idle)
            self.reached = outer
        if not outer.whole or outer not in self._reached:
            self.reach(outer)
        self._pass(call, call.left)
        if marks:
            call.marks_left = sum(map(torch._C._will_engine_execute_node, marks))
        call.unit.forwards.in_backward.add(call)
        self.outstanding.starts(call)

    def pass_inputs(self, call: UnitForward, *_: Any) -> None:
        """A hook of the inputs of ``call``: its backward is over."""
        self.enter()
        unit, outstanding = call.unit, self.outstanding
        if spans.logs:
            spans.ended(call)
        unit.forwards.pending.discard(call)
        unit.forwards.in_backward.discard(call)
        self._schedule.reshard_later(unit)
        if len(self.tasks) > 1 and call.outer is outstanding.recomputation:
            outstanding.reruns_seen = True
            unit.forwards.reruns = max(0, unit.forwards.reruns - 1)
        if not outstanding.awaits_calls(unit) and not outstanding.awaits_reruns(unit, False):
            self._reducer.ready(unit)
        self._pass(call, call.began)

    def reach(self, root: RootForward, grads: Any = None) -> None:
        """The backward under way goes back through ``root``: what it reads must be here, also
        the second time.
        """
        self.enter()
        if not root.whole:
            self._on_part()
        if root in self._reached:
            return
        self._reached.add(root)
        for call in root.calls:
            # again, if this is not the first backward over its graph
            call.unit.forwards.pending.add(call)
        self._bring_back(self._left_out & root.reads)
        for unit in root.reads:
            unit.forwards.pinned_by.add(root)
            self._schedule.ensure_gathered(unit)

    def _leave_out(self, units: frozenset[Unit]) -> None:
        """The backward under way comes to a forward that has left ``units`` out on all ranks.

        What the first forward reached has left out is neither gathered by the plan nor reduced in
        its place. Forwards that this backward does not go through, which one rank alone may have
        run, have no part in that.
        """
        if self.reached is not None:
            self._bring_back(self._left_out - units)
        elif units:
            reads = (root.reads for root in self._reached)
            self._left_out = units.difference(*reads)
            self._schedule.leave_out(self._left_out)
            self._reducer.leave_out(self._left_out)

    def _bring_back(self, units: frozenset[Unit]) -> None:
        """The backward under way uses ``units`` after all: they are fetched, and reduced last."""
        if units:
            self._left_out -= units
            self._reducer.bring_back(units)

    def _pass(self, call: UnitForward, moment: int) -> None:
        """The backward has come to ``moment``: reduce what is complete by that."""
        if len(self.tasks) == 1 and call.outer is not self.outstanding.recomputation:
            if self._first:
                self._first = False
                if any(
                    root is not call.outer and root.began < moment and root.pending
                    for root in self._older
                ):
                    self._reducer.wait_for_older()
            for unit in self.outstanding.reach(moment):
                self._reducer.ready(unit)
        self._reducer.advance()
        self._schedule.let_go(self._reducer.depth, self._awaits)

    def _awaits(self, unit: Unit) -> bool:
        return self.outstanding.awaits(unit, self._reducer.learns)

    # ---- the whole backward ----

    def enter(self) -> None:
        """Called by every hook in a backward: the first begins it."""
        task = graph_task()
        if (
            task == -1
            or (self.tasks and self.tasks[-1][0] == task)
            or any(task == known for known, _ in self.tasks)
        ):
            return
        if self.tasks and self.tasks[0][1]() is None:
            self._abandon()
        if not self.tasks:
            self._begin()
        callback = partial(self._leave, task)
        self.tasks.append((task, weakref.ref(callback)))
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def take_in(self) -> None:
        """A backward without hooks is over: take in what it has left (collective)."""
        with torch.inference_mode(False), torch.no_grad():
            self._begin()
            self._end()

    def put_away_broken(self) -> None:
        """Called from outside forward and backward: forget the backward that an exception there has
        left open, if any.
        """
        if self.tasks and graph_task() == -1:
            self._abandon()

    def _begin(self) -> None:
        self._left_out, self.reached = frozenset(), None
        kind = (
            "backward",
            *(
                (forward, min(count, FORWARDS_TOLD_APART))
                for forward, count in self._forwards.items()
                if forward is not None
            ),
        )
        self._forwards.clear()
        recomputation = RootForward(True)
        self.outstanding.begin(recomputation)
        self._reached, self._first = {recomputation}, True
        self._on_begin()
        # Without sharded parameters a forward concerns no other rank: ranks may have run different
        # numbers of them.
        key = (*kind, self._schedule.resident) if self._schedule.gathers else None
        self._schedule.begin(kind, True)
        self._reducer.begin(key)

    def _leave(self, task: int) -> None:
        known = [number for number, _ in self.tasks]
        if task not in known:
            return
        del self.tasks[known.index(task) :]
        if self.tasks:
            return  # a backward inside a backward: reentrant checkpointing
        self._end()

    def _end(self) -> None:
        self._reducer.note_unfinished()
        self._forget_calls()
        # Gathers first, because other ranks need them before they launch what this one is about to
        # wait for.
        recorded = self._schedule.recording
        self._schedule.issue_rest()
        try:
            self._reducer.finish(recorded)
        except BaseException:
            self._reducer.lose_gradients()
            raise
        self._schedule.end(keep_last=False)

    def _abandon(self) -> None:
        """A backward was broken by an exception: nothing of it may count."""
        self.tasks = []
        self._forget_calls()
        self._reducer.abandon()
        self._schedule.abandon()

    def _forget_calls(self) -> None:
        every = [unit.forwards for unit in self._units]
        for forwards in every:
            for call in forwards.in_backward:
                forwards.pending.discard(call)
            forwards.in_backward.clear()
        # Of the forwards that no hook tells of, a backward is taken to be the oldest one's.
        self._unpin({*self._reached, *self._untracked[:1]})
        self._reached.clear()
        del self._untracked[:1]
        self.outstanding.end()
        if not any(forwards.pending for forwards in every):
            for forwards in every:
                forwards.reruns = 0  # of forwards that no checkpoint runs again

    def _unpin(self, roots: set[RootForward]) -> None:
        for unit in self._units:
            if unit.forwards.pinned_by:
                unit.forwards.pinned_by -= roots
