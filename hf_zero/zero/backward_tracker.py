"""Tracking of the backward under way: its progress, and the forwards that it may still reach.

[Note: graph tasks]
torch numbers running backwards (graph tasks). The first hook that a backward reaches registers it
here and queues a callback for its end; an exception drops the callback. A backward inside a
backward is reentrant checkpointing and belongs to the outer one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from hf_zero.device import spans
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.gather.unit import OutermostForward, Unit, UnitCall
from hf_zero.zero.reduce.reducer import Reducer

# up to this number, forwards of one kind before a backward select its plan; more share one
FORWARDS_TOLD_APART = 4

graph_task = torch._C._current_graph_task_id  # number of the backward that this thread runs, or -1


class BackwardTracker:
    """Follows a backward through one engine's model: gathers the units it reads, and reports
    complete units to ``reducer``.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        reducer: Reducer,
        on_begin: Callable[[], None],
        on_part: Callable[[], None],
        on_abort: Callable[[], None],
    ):
        """``on_begin`` is called before a backward, ``on_part`` when it reaches a submodule called
        directly, ``on_abort`` when it is aborted after an exception.
        """
        self._units = list(units)
        self._schedule = schedule
        self._reducer = reducer
        self._on_begin, self._on_part, self._on_abort = on_begin, on_part, on_abort
        self.remaining = reducer.remaining
        # graph tasks under way, outermost first, and their callbacks
        self.tasks: list[tuple[int, weakref.ref[object]]] = []
        # forwards since the last backward, by kind; None: those that may have run on one rank only
        self._forwards: Counter[Hashable] = Counter()
        self._first = False  # until the backward under way reaches its first call
        # the newest included
        self._with_graph: weakref.WeakSet[OutermostForward] = weakref.WeakSet()
        # forwards reached by the backward under way
        self._roots_reached: set[OutermostForward] = set()
        # The forward that the backward has reached last.
        self.current_root: OutermostForward | None = None
        # units left out by all forwards that the backward under way has reached
        self._left_out: frozenset[Unit] = frozenset()
        # forwards without hooks: any backward may be theirs
        self._untracked: list[OutermostForward] = []

    @property
    def under_way(self) -> bool:
        """Return whether a backward has begun and neither ended nor raised."""
        return bool(self.tasks) and self.tasks[0][1]() is not None

    @property
    def awaits_backward(self) -> bool:
        """Return whether a forward since the last backward has left a graph, as far as known."""
        calls = (unit.forwards for unit in self._units)
        return bool(self._forwards or self._untracked) or any(
            call.pending or call.read_by for call in calls
        )

    # ---- forwards ----

    def add_forward(self, kind: Hashable, joint: bool) -> None:
        """Register a forward of ``kind`` with a graph; ``joint``: all ranks run it together."""
        self._forwards[kind if joint else None] += 1

    def add_call(self, call: UnitCall) -> None:
        """Register ``call``, which has ended and has hooks on its outputs, as pending."""
        if not call.root.tracked:
            call.root.tracked = True
            self._with_graph.add(call.root)
        call.root.calls.add(call)
        call.unit.forwards.pending.add(call)

    def end_forward(self, root: OutermostForward, has_graph: bool) -> None:
        """End an outermost forward. Without a graph its units are no longer kept; of forwards kept
        without a hook only the last few are.
        """
        if not has_graph:
            self._end_reads({root})
        elif not root.tracked and any(root in unit.forwards.read_by for unit in self._units):
            self._untracked.append(root)
            self._end_reads(set(self._untracked[:-FORWARDS_TOLD_APART]))
            del self._untracked[:-FORWARDS_TOLD_APART]

    # ---- the backward of a call ----

    def begin_call(self, call: UnitCall) -> None:
        """Begin the backward of ``call``, and that of its outermost forward with the first one."""
        root = call.root
        if root is not self.current_root and root is not self.remaining.recomputation:
            if self._left_out or root.left_out:
                self._leave_out(root.left_out)
            self._reducer.idle.add_forward(root.idle)
            self.current_root = root
        # A submodule called directly calls ``_on_part`` each time: a loss scale may have been put
        # at other outputs since.
        if not root.of_whole_model or root not in self._roots_reached:
            self.reach_root(root)

    def add_unmarked(self, call: UnitCall) -> None:
        """Register ``call``, whose backward has begun, as one whose end no hook reports."""
        self.remaining.unmarked.append(call)

    def end_call(self, call: UnitCall) -> None:
        """End the backward of ``call``: the gradients of its unit are complete unless another call
        of it is pending, or a checkpoint may rerun it.
        """
        unit, remaining = call.unit, self.remaining
        if len(self.tasks) > 1 and call.root is remaining.recomputation:
            remaining.reruns_seen = True
            unit.forwards.expected_reruns = max(0, unit.forwards.expected_reruns - 1)
            unit.forwards.seen_reruns += 1
        if not remaining.awaits_calls(unit) and not remaining.awaits_reruns(unit, False):
            self._reducer.mark_complete(unit)

    def reach_root(self, root: OutermostForward, grads: object = None) -> None:
        """Gather the units that the backward of ``root`` reads, also for a second backward over its
        graph. Also a prehook of an autograd node, hence ``grads``.
        """
        self.enter()
        if not root.of_whole_model:
            self._on_part()
        if root in self._roots_reached:
            return
        self._roots_reached.add(root)
        for call in root.calls:
            # pending again in a second backward over its graph
            call.unit.forwards.pending.add(call)
        if self._left_out:
            self._restore_left_out(self._left_out & root.reads)
        for unit in root.reads:
            unit.forwards.read_by.add(root)
            self._schedule.ensure_gathered(unit)

    def _leave_out(self, units: frozenset[Unit]) -> None:
        """Leave ``units`` out of the backward under way, which reaches a forward that has left them
        out on all ranks.

        Units left out by the first forward reached are neither gathered by the plan nor reduced at
        their place. Forwards that this backward does not reach have no influence, since one rank
        may have run them alone.
        """
        if self.current_root is not None:
            self._restore_left_out(self._left_out - units)
        elif units:
            reads = (root.reads for root in self._roots_reached)
            self._left_out = units.difference(*reads)
            self._schedule.leave_out(self._left_out)
            self._reducer.leave_out(self._left_out)

    def _restore_left_out(self, units: frozenset[Unit]) -> None:
        """Undo leaving out ``units``, which this backward uses: fetch them, reduce them last."""
        if units:
            self._left_out -= units
            self._reducer.restore_left_out(units)

    def advance_to(self, call: UnitCall, tick: int) -> None:
        """Advance the backward, which is in ``call``, to ``tick``: every forward of its graph that
        began later is done. Reduce the units that are complete by then.
        """
        if len(self.tasks) == 1 and call.root is not self.remaining.recomputation:
            if self._first:
                self._first = False
                for root in self._with_graph:
                    if root is not call.root and root.began < tick and root.pending:
                        self._reducer.wait_for_older()
                        break
            for unit in self.remaining.advance_to(tick):
                self._reducer.mark_complete(unit)
        while (complete := self._reducer.take_next()) is not None:
            self._reducer.launch(complete)
        if self._schedule.gathered_for_others:
            self._schedule.release_skipped(self._reducer.progress.depth, self._awaits)

    def _awaits(self, unit: Unit) -> bool:
        return self.remaining.awaits(unit, self._reducer.progress.learns)

    def refuse_updated(self, unit: Unit) -> None:
        """Raise PartitionError for a forward of ``unit`` inside the backward under way, if that has
        changed its values already.
        """
        progress = self._reducer.progress
        changed = progress.under_way and unit in progress.updated
        if changed and any(flat.follows_updates for flat in unit.trainable_flats):
            raise PartitionError(
                f"{unit.label} runs again inside a backward that has updated it, in a "
                "recomputation that needs none of its gradients (under torch.no_grad()), and would "
                "compute with other values than the forward: call it outside the checkpoint, or "
                "switch zero_optimization.update_in_backward off"
            )

    # ---- the whole backward ----

    def enter(self) -> None:
        """Begin a backward if none is under way. Called by every hook in a backward."""
        task = graph_task()
        if task == -1 or (self.tasks and self.tasks[-1][0] == task):
            return
        for open_task, _ in self.tasks:
            if open_task == task:
                return
        if self.tasks and self.tasks[0][1]() is None:
            self._abort()
        if not self.tasks:
            self._begin()
        callback = partial(self._end_task, task)
        self.tasks.append((task, weakref.ref(callback)))
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def reduce_stray_gradients(self) -> None:
        """Take in the gradients of a backward that triggered no hooks (collective)."""
        with torch.inference_mode(False), torch.no_grad():
            self._begin()
            self._end()

    def abort_broken_backward(self) -> None:
        """Abort a backward that an exception has left open, if any, outside of passes."""
        if self.tasks and graph_task() == -1:
            self._abort()

    def _begin(self) -> None:
        self._left_out, self.current_root = frozenset(), None
        parts: list[Hashable] = ["backward"]
        for forward, count in self._forwards.items():
            if forward is not None:
                parts.append((forward, min(count, FORWARDS_TOLD_APART)))
        kind = tuple(parts)
        follows = not self._forwards and not self._untracked
        for unit in self._units:
            forwards = unit.forwards
            if forwards.seen_reruns:
                if follows:  # another backward over the same graphs
                    forwards.expected_reruns = max(forwards.expected_reruns, forwards.seen_reruns)
                forwards.seen_reruns = 0
        self._forwards.clear()
        recomputation = OutermostForward(True)  # stand-in for forwards recomputed in this backward
        self.remaining.begin(recomputation)
        self._roots_reached, self._first = {recomputation}, True
        self._on_begin()
        # Without sharded parameters a forward involves no other rank: ranks may have run different
        # numbers of them.
        key = (*kind, self._schedule.resident) if self._schedule.has_sharded_units else None
        self._schedule.begin(kind, True)
        self._reducer.begin(key)

    def _end_task(self, task: int) -> None:
        numbers = [number for number, _ in self.tasks]
        if task not in numbers:
            return
        del self.tasks[numbers.index(task) :]
        if self.tasks:
            return  # a backward inside a backward: reentrant checkpointing
        self._end()

    def _end(self) -> None:
        try:
            self._reducer.note_unfinished()
            self._forget_calls()
            # Gathers first: other ranks need them before they launch the reductions that this one
            # waits for.
            recorded = self._schedule.recording
            self._schedule.issue_rest()
            self._reducer.finish(recorded)
        except BaseException:
            self._reducer.lose_gradients()
            self._schedule.abort()
            raise
        self._schedule.end(keep_last=False)

    def _abort(self) -> None:
        """Abort a backward after an exception and discard its results."""
        self.tasks = []
        self._on_abort()
        self._forget_calls()
        self._reducer.abort()
        self._schedule.abort()

    def _forget_calls(self) -> None:
        pending = False
        for unit in self._units:
            forwards = unit.forwards
            for call in forwards.in_backward:
                forwards.pending.discard(call)
                if spans.blocks:  # no hook has: its inputs need no gradient
                    spans.ended(call)
            forwards.in_backward.clear()
            pending = pending or bool(forwards.pending)
        # The backward is attributed to the oldest forward without hooks.
        self._end_reads({*self._roots_reached, *self._untracked[:1]})
        self._roots_reached.clear()
        del self._untracked[:1]
        self.remaining.end()
        if not pending:
            for unit in self._units:
                unit.forwards.expected_reruns = 0  # these forwards are not rerun by a checkpoint

    def _end_reads(self, roots: set[OutermostForward]) -> None:
        for unit in self._units:
            if unit.forwards.read_by:
                unit.forwards.read_by -= roots
