"""The passes of a model: the hooks on its modules, which begin and end forwards and call the units
(``gather/unit.py``), and the backward under way, with the forwards that it may still reach.

[Note: graph tasks]
torch numbers running backwards (graph tasks). The first hook that a backward reaches registers it
here and queues a callback for its end; an exception drops the callback. A backward inside a
backward is reentrant checkpointing and belongs to the outer one.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hf_zero.device import spans
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.left_out import LeftOutModules
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.gather.unit import LastOutput, OutermostForward, Unit, UnitCall, next_tick
from hf_zero.zero.layout.parameter_views import any_raw_grad
from hf_zero.zero.layout.tree import is_cache, transformed
from hf_zero.zero.layout.walk import named_modules_of
from hf_zero.zero.reduce.reducer import Reducer

_module = itemgetter(0)
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# With a cache or this argument a step of generate runs other blocks than a whole forward, and has a
# plan of its own. Other arguments do not select a plan: ranks may differ in them.
ENCODED = "encoder_outputs"
# up to this number, forwards of one kind before a backward select its plan; more share one
FORWARDS_TOLD_APART = 4

graph_task = torch._C._current_graph_task_id  # number of the backward that this thread runs, or -1


class ModuleHooks:
    """The hooks on the modules of ``model``, which call the units, the schedule of gathers and the
    backward tracker.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        tracker: BackwardTracker,
        refuse: Callable[[str, bool], None],
    ):
        """``refuse``: raises where an outermost forward may not begin; True: one of training, in
        training mode or with a graph.
        """
        self._model = model
        self._refuse = refuse
        self._units = list(units)
        self._schedule = schedule
        self._tracker = tracker
        # hooked modules whose forward is running, outermost first, and the exception that was being
        # handled as each began
        self._running: list[tuple[nn.Module, BaseException | None]] = []
        self._outermost: OutermostForward | None = None  # the forward under way
        self._last: LastOutput | None = None
        self.left_out = LeftOutModules(model, units)
        self.forward_count = 0  # forwards with gradients
        self._removable: list[RemovableHandle] = []
        self._watches = False
        self._training = [
            parameter
            for unit in units
            for flat in unit.trainable_flats
            for parameter in flat.members
        ]
        for unit in units:
            unit.connect(schedule, tracker)
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        names = {module: name for name, module in named_modules_of(model)}
        around: dict[nn.Module, Unit | None] = {
            module: unit for unit in self._units for module in unit.modules.values()
        }
        root = self._units[0]
        in_root = {id(parameter) for flat in root.flats for parameter, _ in flat.items}
        for module, path in names.items():
            # A script may call a submodule directly, so each module with a parameter of the root
            # gathers the root; for a ParameterList, which no script calls, the module around it.
            if any(id(p) in in_root for p in module._parameters.values() if p is not None):
                while path and type(module).forward is nn.Module.forward:
                    module = model.get_submodule(path := path.rpartition(".")[0])
                around.setdefault(module, root)
        outer = {""}  # paths of modules with units inside
        for path in (name for unit in self._units for name in unit.modules):
            while (path := path.rpartition(".")[0]) not in outer:
                outer.add(path)
        for path in outer:
            around.setdefault(model.get_submodule(path), None)
        for module, unit in around.items():
            self._removable += [
                module.register_forward_pre_hook(
                    Attached(self._pre_forward, unit, names[module]), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(
                    Attached(self._post_forward, unit), with_kwargs=True, always_call=True
                ),
            ]

    def watch_gradients(self) -> None:
        """Let every accumulated gradient begin a backward from now on: its loss scale must be known
        then (``losses.py``).
        """
        if self._watches or not self._removable:
            return
        self._watches = True
        # A weak reference, because Python's garbage collector does not see these hooks: a cycle
        # through one would never be freed.
        accumulated = partial(_accumulated, weakref.ref(self._tracker))
        for parameter in self._training:
            requires_grad = parameter.requires_grad
            parameter.requires_grad_()  # torch takes no hook of one that a script has frozen
            self._removable.append(parameter.register_post_accumulate_grad_hook(accumulated))
            parameter.requires_grad_(requires_grad)

    def reduce_stray_gradients(self) -> None:
        """Take in ``.grad`` left by a backward that our hooks did not see, from a penalty on the
        weights, or assigned by a script (collective).

        Called outside forward and backward, at the same places of the script on every rank.
        """
        if (
            not self._tracker.tasks
            and not self._running
            and not self._tracker.inside_backward
            and any_raw_grad(self._training)
        ):
            self._tracker.reduce_stray_gradients()

    @contextmanager
    def backward_of(self, loss: torch.Tensor) -> Iterator[None]:
        """Context for the backward of ``loss``: this engine's, even if it reaches no module."""
        handle = loss.register_hook(lambda _: self._tracker.enter()) if loss.requires_grad else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable = []

    @property
    def forward_runs(self) -> bool:
        """Return whether a forward is under way."""
        return bool(self._running)

    @property
    def current_forward(self) -> OutermostForward | None:
        """The outermost forward under way; in a backward, the one that is recomputed."""
        inside = graph_task() != -1 and self._tracker.inside_backward
        return self._tracker.current_forward if inside else self._outermost

    def _pre_forward(
        self,
        unit: Unit | None,
        name: str,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        # pre-forward hook of ``module``, at path ``name`` of the model
        if _transforms() and transformed():
            if unit is not None:
                _refuse_transform(unit)
                unit.wait_for_update()
            return None
        tracker = self._tracker
        inside = graph_task() != -1 and tracker.inside_backward  # of each block: no call outside
        if inside:
            tracker.enter()
        elif tracker.tasks:
            tracker.abort_broken_backward()
        if not self._running and not inside:
            self._begin_pass(name, module, kwargs, torch.is_grad_enabled())
        self._running.append((module, sys.exc_info()[1]))
        last, self._last = self._last, None
        if unit is None:
            return None
        if inside:
            tracker.refuse_updated(unit)
        if spans.blocks:
            spans.began(module, "forward", name or unit.label)
        forward = tracker.remaining.recomputation if inside else self._outermost
        return unit.pre_forward(module, args, kwargs, forward, last, inside)

    def _begin_pass(
        self, name: str, module: nn.Module, kwargs: Mapping[str, object], grads: bool
    ) -> None:
        """Begin the forward pass of ``module``, the outermost one, at path ``name`` of the model;
        ``grads``: it records a graph.
        """
        self.reduce_stray_gradients()
        self._refuse("a forward", grads or module.training)
        kind: tuple[Hashable, ...] = (name, grads, module.training)
        for key, value in kwargs.items():
            if is_cache(value) or (key == ENCODED and value is not None):
                kind += (key,)
        self._outermost = OutermostForward(module is self._model, next_tick(), name)
        if grads and self.left_out.sources:
            self.left_out.record(self._outermost)
        self._schedule.begin(kind, left_out=self._outermost.left_out)
        if grads:
            self.forward_count += 1
            self._tracker.add_forward(kind, joint=not self._schedule.between_passes)

    def _post_forward(
        self, unit: Unit | None, module: nn.Module, args: object, kwargs: object, output: object
    ) -> object:
        # post-forward hook of ``module``
        if _transforms() and transformed():
            return None
        inside, running = graph_task() != -1 and self._tracker.inside_backward, self._running
        # The hook also runs after an exception, which is then being handled. One that was handled
        # before, around the call, is none of this forward.
        raised, handled = sys.exc_info()[1], None
        begun = module in map(_module, running)  # else a pre-hook, of ours or ahead, has raised
        last: nn.Module | None = None
        while begun and last is not module:  # an interrupt bypasses the hooks of modules inside
            last, handled = running.pop()
        if raised is handled:
            raised = None
        if spans.blocks:
            spans.ended(module)
        returned = None
        if begun and unit is not None and unit.calls.in_forward:
            returned, self._last = unit.post_forward(module, output, raised, inside)
        if not running and not inside:
            forward, self._outermost, self._last = self._outermost, None, None
            if forward is not None:
                self._tracker.end_forward(forward, torch.is_grad_enabled())
            self._schedule.record_forward_error(raised)
            if raised is not None:
                self._schedule.abort()  # the forward has raised
            else:
                self._schedule.end(keep_last=torch.is_grad_enabled())
        return returned

    def gather_on_use(self, unit: Unit) -> bool:
        """Gather ``unit`` for a module that reads another module's parameter in its forward; return
        False outside forwards.
        """
        if not self._running:
            return False
        self._tracker.enter()
        self._tracker.refuse_updated(unit)
        self._schedule.ensure_gathered(unit)
        # a graph recorded on it keeps it (:meth:`keep_for_backward`)
        self._schedule.release_later(unit)
        return True

    def keep_for_backward(self, unit: Unit, node: Node) -> None:
        """Keep ``unit`` gathered for the backward of ``node``, which was recorded outside the
        unit's own forward.
        """
        forward = OutermostForward(
            of_whole_model=self.forward_runs or self._tracker.inside_backward
        )
        unit.keep_for_backward(forward)
        node.register_prehook(partial(self._tracker.reach_forward, forward))

    def abort_broken_pass(self) -> None:
        """Abort a forward or backward that an exception has left open; none may be running.
        KeyboardInterrupt bypasses the post-forward hooks.
        """
        if self._tracker.tasks:
            self._tracker.abort_broken_backward()
        if self._running and not self._tracker.inside_backward:
            self._running, self._outermost, self._last = [], None, None
            for unit in self._units:
                unit.calls.in_forward.clear()
            self._schedule.abort()


def _accumulated(tracker: weakref.ref[BackwardTracker], parameter: torch.Tensor) -> None:
    """Begin a backward at a gradient that reaches no unit's hook, such as the gradient of a penalty
    on the weights.
    """
    alive = tracker()
    if alive is not None:
        alive.enter()


def _refuse_transform(unit: Unit) -> None:
    """Raise PartitionError for a forward of ``unit`` under grad, vmap or another torch.func
    transform, which has its own graphs and is no pass of this engine, if the unit is sharded, or if
    modules compute with changed values.
    """
    if unit.sharded_flats:
        raise PartitionError(
            f"torch.func goes through {unit.label}, whose parameters are sharded (stage 3): "
            "the backward inside a transform would read weights that are released by then; use "
            "stage 2 for models under torch.func"
        )
    changed = [flat.transform for flat in unit.flats if flat.transform is not None]
    if changed:
        raise PartitionError(
            f"torch.func goes through {unit.label}, whose modules compute with "
            f"{changed[0].values}, and a transform would see them as they are; apply it to a "
            "model without an engine"
        )


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
        on_end: Callable[[], None] | None,
        on_part: Callable[[], None],
        on_abort: Callable[[], None],
    ):
        """``on_begin`` is called before a backward, ``on_end`` at its end, ``on_part`` when it
        reaches a submodule called directly, ``on_abort`` when it is aborted after an exception.
        """
        self._units = list(units)
        self._schedule = schedule
        self._reducer = reducer
        self._on_begin, self._on_end = on_begin, on_end
        self._on_part, self._on_abort = on_part, on_abort
        self.remaining = reducer.remaining
        # graph tasks under way, outermost first, and their callbacks
        self.tasks: list[tuple[int, weakref.ref[object]]] = []
        self._ended_task = -1  # the last outermost one whose callback was called
        # number of forwards since the last backward, by kind; None: of those that may have run on
        # one rank only
        self._forwards_by_kind: Counter[Hashable] = Counter()
        self._first = False  # until the backward under way reaches its first call
        # forwards with calls whose outputs have hooks, the newest included
        self._with_graph: weakref.WeakSet[OutermostForward] = weakref.WeakSet()
        # forwards reached by the backward under way
        self._forwards_reached: set[OutermostForward] = set()
        # the forward that the backward has reached last
        self.current_forward: OutermostForward | None = None
        # the last forward with a graph since the last backward
        self._last_forward: OutermostForward | None = None
        # units left out by all forwards that the backward under way has reached
        self._left_out: frozenset[Unit] = frozenset()
        # forwards without hooks: any backward may be theirs
        self._untracked: list[OutermostForward] = []

    @property
    def inside_backward(self) -> bool:
        """Return whether this thread runs a backward. torch calls the callback for its end, with
        which an update in the backward runs hooks of the optimizer, within the same graph task.
        """
        return graph_task() not in (-1, self._ended_task)

    @property
    def under_way(self) -> bool:
        """Return whether a backward has begun and neither ended nor raised."""
        return bool(self.tasks) and self.tasks[0][1]() is not None

    @property
    def awaits_backward(self) -> bool:
        """Return whether a forward since the last backward has left a graph, as far as known."""
        return bool(self._forwards_by_kind or self._untracked) or any(
            unit.calls.pending or unit.calls.read_by for unit in self._units
        )

    def add_forward(self, kind: Hashable, joint: bool) -> None:
        """Register a forward of ``kind`` with a graph; ``joint``: all ranks run it together."""
        self._forwards_by_kind[kind if joint else None] += 1

    def add_call(self, call: UnitCall) -> None:
        """Register ``call``, which has ended and has hooks on its outputs, as pending."""
        if not call.outermost.tracked:
            call.outermost.tracked = True
            self._with_graph.add(call.outermost)
        call.outermost.calls.add(call)
        call.unit.calls.pending.add(call)

    def end_forward(self, forward: OutermostForward, has_graph: bool) -> None:
        """End an outermost forward. Without a graph its units are no longer kept; of forwards kept
        without a hook only the last few are.
        """
        self._last_forward = forward if has_graph else self._last_forward
        if not has_graph:
            self._end_reads({forward})
        elif not forward.tracked and any(forward in unit.calls.read_by for unit in self._units):
            self._untracked.append(forward)
            self._end_reads(set(self._untracked[:-FORWARDS_TOLD_APART]))
            del self._untracked[:-FORWARDS_TOLD_APART]

    def begin_call(self, call: UnitCall) -> None:
        """Begin the backward of ``call``, and that of its outermost forward with the first one."""
        forward = call.outermost
        if forward is not self.current_forward and forward is not self.remaining.recomputation:
            self._begin_forward(forward)
        # A submodule called directly calls ``_on_part`` each time: a loss scale may have been put
        # at other outputs since.
        if not forward.of_whole_model or forward not in self._forwards_reached:
            self.reach_forward(forward)

    def _begin_forward(self, forward: OutermostForward) -> None:
        """Begin the backward of the outermost forward ``forward``."""
        if self._left_out or forward.left_out:
            self._leave_out(forward.left_out)
        self._reducer.idle.add_forward(forward.idle)
        self.current_forward = forward

    def add_unmarked(self, call: UnitCall) -> None:
        """Register ``call``, whose backward has begun, as one whose end no hook reports."""
        self.remaining.unmarked.append(call)

    def end_call(self, call: UnitCall) -> None:
        """End the backward of ``call``: the gradients of its unit are complete unless another call
        of it is pending, or a checkpoint may rerun it.
        """
        unit, remaining = call.unit, self.remaining
        if len(self.tasks) > 1 and call.outermost is remaining.recomputation:
            remaining.reruns_seen = True
            unit.calls.expected_reruns = max(0, unit.calls.expected_reruns - 1)
            unit.calls.seen_reruns += 1
        if not remaining.awaits_calls(unit) and not remaining.awaits_reruns(unit, False):
            self._reducer.mark_complete(unit)

    def reach_forward(self, forward: OutermostForward, grads: object = None) -> None:
        """Gather the units that the backward of ``forward`` reads, once the backward under way has
        reached it, also for a second backward over its graph. Also a prehook of an autograd node,
        hence ``grads``.
        """
        self.enter()
        if not forward.of_whole_model:
            self._on_part()
        if forward in self._forwards_reached:
            return
        self._forwards_reached.add(forward)
        for call in forward.calls:
            # pending again in a second backward over its graph
            call.unit.calls.pending.add(call)
        if self._left_out:
            self._restore_left_out(self._left_out & forward.reads)
        for unit in forward.reads:
            unit.calls.read_by.add(forward)
            self._schedule.ensure_gathered(unit)

    def _leave_out(self, units: frozenset[Unit]) -> None:
        """Leave ``units`` out of the backward under way, which reaches a forward that has left them
        out on all ranks.

        Units left out by the first forward reached are neither gathered by the plan nor reduced at
        their place. Forwards that this backward does not reach have no influence, since one rank
        may have run them alone.
        """
        if self.current_forward is not None:
            self._restore_left_out(self._left_out - units)
        elif units:
            reads = (forward.reads for forward in self._forwards_reached)
            self._left_out = units.difference(*reads)
            self._schedule.leave_out(self._left_out)
            self._reducer.leave_out(self._left_out)

    def _restore_left_out(self, units: frozenset[Unit]) -> None:
        """Undo leaving out ``units``, which this backward uses: fetch them, reduce them last."""
        if units:
            self._left_out -= units
            self._reducer.restore_left_out(units)

    def launch_complete_units(self, call: UnitCall, tick: int) -> None:
        """Launch the reductions of the units that are complete once the backward, which is in
        ``call``, has come to ``tick``: every forward of its graph that began later is done. Release
        the units that were gathered for other ranks alone.
        """
        if len(self.tasks) == 1 and call.outermost is not self.remaining.recomputation:
            if self._first:
                self._first = False
                for forward in self._with_graph:
                    if forward is not call.outermost and forward.began < tick and forward.pending:
                        self._reducer.note_older_pending()
                        break
            for unit in self.remaining.advance_to(tick):
                self._reducer.mark_complete(unit)
        while (complete := self._reducer.take_next()) is not None:
            self._reducer.launch(complete)
        if self._schedule.gathered_for_others:
            progress = self._reducer.progress
            self._schedule.release_skipped(
                progress.depth, partial(self.remaining.awaits, learning=progress.learns)
            )

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

    def enter(self) -> None:
        """Begin a backward if none is under way. Called by every hook in a backward."""
        task = graph_task()
        if (self.tasks and self.tasks[-1][0] == task) or not self.inside_backward:
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
        if self.tasks and not self.inside_backward:
            self._abort()

    def _begin(self) -> None:
        self._left_out, self.current_forward = frozenset(), None
        parts: list[Hashable] = ["backward"]
        for forward, count in self._forwards_by_kind.items():
            if forward is not None:
                parts.append((forward, min(count, FORWARDS_TOLD_APART)))
        kind = tuple(parts)
        follows = not self._forwards_by_kind and not self._untracked
        for unit in self._units:
            calls = unit.calls
            if calls.seen_reruns:
                if follows:  # another backward over the same graphs
                    calls.expected_reruns = max(calls.expected_reruns, calls.seen_reruns)
                calls.seen_reruns = 0
        self._forwards_by_kind.clear()
        recomputation = OutermostForward(True)  # stand-in for forwards recomputed in this backward
        self.remaining.begin(recomputation)
        self._forwards_reached, self._first = {recomputation}, True
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
        self._ended_task = task
        self._end()

    def _end(self) -> None:
        try:
            self._reducer.note_unfinished()
            if self.current_forward is None and self._last_forward is not None:
                # The loss of this rank is a constant, as of an empty batch; other ranks have one
                # of this forward.
                self._begin_forward(self._last_forward)
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
        if self._on_end is not None:
            self._on_end()

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
            calls = unit.calls
            for call in calls.in_backward:
                calls.pending.discard(call)
                if spans.blocks:  # no hook has: its inputs need no gradient
                    spans.ended(call)
            calls.in_backward.clear()
            pending = pending or bool(calls.pending)
        # The backward is attributed to the oldest forward without hooks.
        self._last_forward = None
        self._end_reads({*self._forwards_reached, *self._untracked[:1]})
        self._forwards_reached.clear()
        del self._untracked[:1]
        self.remaining.end()
        if not pending:
            for unit in self._units:
                unit.calls.expected_reruns = 0  # these forwards are not rerun by a checkpoint

    def _end_reads(self, forwards: set[OutermostForward]) -> None:
        for unit in self._units:
            if unit.calls.read_by:
                unit.calls.read_by -= forwards
