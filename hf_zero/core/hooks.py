"""The hooks on modules and on the autograd graph: when a unit is needed, when its backward begins
and when it is over.

[Note: the end of a unit's backward]
Autograd runs ready nodes in reverse order of creation. The mark on a unit's inputs is made before
every node of its forward, so its backward runs after all of them: gradients are complete and no
saved weight will be read again. Where no input requires grad there is no mark, and the end of the
whole backward is taken instead.

Where a module takes what another of its unit has just returned, both are one call: the marks of the
first are the end of both, and the second has no marks. A backward may begin behind either.

Calls are tokens in sets, not counts: a forward that is dropped takes its token with it.
Recomputation (activation checkpointing) runs forwards inside a backward; a forward there never
releases.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from hf_zero import spans
from hf_zero.core.guards import Attached
from hf_zero.core.schedule import Schedule
from hf_zero.errors import PartitionError
from hf_zero.gradients.gradient_reducer import GradientReducer
from hf_zero.gradients.outstanding import Outstanding
from hf_zero.parameters.parameter import any_raw_grad
from hf_zero.parameters.tree import requiring_grad, tensors_in, transformed, with_replaced
from hf_zero.units.unit import RootForward, Unit, UnitForward

FORWARDS_TOLD_APART = 4  # more forwards of one kind before a backward share a plan
# With these a decoder step of generate goes another way than a whole forward. Other keywords may be
# None on some ranks only.
CHOOSES_THE_WAY = ("past_key_values", "cache_params", "encoder_outputs")


_graph_task = torch._C._current_graph_task_id


def _last_node() -> int:
    """The number of the last node of a graph that this thread has recorded; a backward comes to
    higher numbers first.
    """
    return torch.autograd._get_sequence_nr() - 1


def _mark(
    inputs: Iterable[torch.Tensor], call: UnitForward, over: Callable[..., None]
) -> Sequence[torch.Tensor]:
    """``inputs`` again as views, which a block may change in place, with ``over`` called once all
    their gradients are known.

    Not each of several inputs has a part in every backward: those that have are counted when the
    backward of ``call`` begins.
    """
    views = [each.view_as(each) for each in inputs]
    nodes = [node for view in views if (node := view.grad_fn) is not None]
    if len(nodes) == 1:
        nodes[0].register_hook(over)
        return views
    call.marks = nodes

    def passed(*_: Any) -> None:
        call.marks_left -= 1
        if call.marks_left == 0:
            over()

    for node in nodes:
        node.register_hook(passed)
    return views


def _accumulated(hooks: weakref.ref[Hooks], parameter: torch.Tensor) -> None:
    """A gradient has come that no unit's hook need have announced: that of a penalty on the
    weights, say.
    """
    alive = hooks()
    if alive is not None:
        alive._enter_backward()


def _keep(unit: Unit, outer: RootForward) -> None:
    outer.reads.add(unit)
    unit.pinned_by.add(outer)


class Hooks:
    """Connects units with the schedule of gathers and the reducer of gradients."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        reducer: GradientReducer,
        on_begin: Callable[[], None],
        on_part: Callable[[], None],
    ):
        """``on_begin`` is called before a backward, ``on_part`` where it reaches a part of the
        model that was called alone.
        """
        self._model = model
        self._units = list(units)
        self._schedule = schedule
        self._reducer = reducer
        # Graph tasks under way, outermost first, and their callbacks: a task that an exception has
        # ended drops its callback.
        self._tasks: list[tuple[int, weakref.ref[Any]]] = []
        self._nested = 0  # hooked modules whose forward is under way
        self._forwards: Counter[Hashable] = Counter()  # forwards since the last backward
        self._outer: RootForward | None = None  # the forward under way
        # the call left last, an output of it, and the marks of its inputs
        self._last: tuple[UnitForward, torch.Tensor, Sequence[Node]] | None = None
        self._outstanding = Outstanding()
        self._first = False  # no call of the backward under way has been reached
        self._older: weakref.WeakSet[RootForward] = weakref.WeakSet()  # forwards with a graph
        reducer.connect(schedule, self._outstanding)
        schedule.launched, schedule.on_launched = (lambda: reducer.launched), reducer.land_launched
        # forwards that the backward under way goes back through
        self._reached: set[RootForward] = set()
        # forwards that no hook tells of: any backward may be theirs
        self._untracked: list[RootForward] = []
        self._removable: list[Any] = []
        self._installed, self._watches = True, False
        self._training = [
            parameter for unit in units for flat in unit.trainable for parameter in flat.members
        ]
        self._on_begin, self._on_part = on_begin, on_part
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        around: dict[nn.Module, Unit | None] = {
            module: unit for unit in self._units for module in unit.modules.values()
        }
        root = self._units[0]
        in_root = {id(parameter) for flat in root.flats for parameter, _ in flat.items}
        for module in model.modules():
            # People call parts of models: whoever owns a parameter of the root unit gathers it.
            if module not in around and any(
                id(p) in in_root for p in module._parameters.values() if p is not None
            ):
                around[module] = root
        for path in (name.split(".") for unit in self._units for name in unit.modules):
            for depth in range(len(path)):
                around.setdefault(model.get_submodule(".".join(path[:depth])), None)
        for module, unit in around.items():
            self._removable += [
                module.register_forward_pre_hook(
                    Attached(self._enter, unit, names[module]),
                    prepend=True,
                    with_kwargs=True,
                ),
                module.register_forward_hook(
                    Attached(self._leave, unit), with_kwargs=True, always_call=True
                ),
            ]

    def watch_gradients(self) -> None:
        """From now on every gradient that comes begins a backward: what it carries must be known
        then (``losses.py``).
        """
        if self._watches or not self._installed:
            return
        self._watches = True
        # Weakly, because Python's collector does not see these hooks: a cycle through one would
        # never be freed.
        accumulated = partial(_accumulated, weakref.ref(self))
        self._removable += [
            parameter.register_post_accumulate_grad_hook(accumulated)
            for parameter in self._training
        ]

    def take_in_unannounced(self) -> None:
        """Take in what a backward has left on parameters that no hook has announced: a penalty on
        the weights, say (collective).

        Outside forward and backward. Every rank comes here at the same places of the script.
        """
        if (
            self._watches
            or self._tasks
            or self._nested
            or _graph_task() != -1
            or not any_raw_grad(self._training)
        ):
            return
        with torch.inference_mode(False), torch.no_grad():
            self._begin()
            self._end()

    @contextmanager
    def announced(self, loss: torch.Tensor) -> Iterator[None]:
        """The backward of ``loss`` goes on inside, and is this engine's wherever it leads."""
        handle = (
            loss.register_hook(lambda _: self._enter_backward()) if loss.requires_grad else None
        )
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable, self._installed = [], False

    def is_in_backward(self) -> bool:
        # None: an exception has ended it
        return bool(self._tasks) and self._tasks[0][1]() is not None

    def _enter(
        self, unit: Unit | None, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if transformed():
            return self._enter_transformed(unit)
        inside = _graph_task() != -1
        if inside:
            self._enter_backward()
        elif self._tasks:
            self._abandon_backward()
        grads = torch.is_grad_enabled()
        if self._nested == 0 and not inside:
            self.take_in_unannounced()
            given = [key for key in CHOOSES_THE_WAY if kwargs.get(key) is not None]
            kind = (name, grads, module.training, *given)
            self._schedule.begin(kind)
            self._outer = RootForward(module is self._model, self._outstanding.moment())
            if grads:
                self._forwards[kind] += 1
        self._nested += 1
        last, self._last = self._last, None
        if unit is None:
            return None
        if spans.logs:
            spans.began(module, "forward", name or unit.label)
        if not grads:
            if module.training and unit.trainable and not inside:
                unit.reruns += 1
            unit.in_forward.append(None)
            self._schedule.ensure_gathered(unit, module)
            return None
        inputs = requiring_grad(args, kwargs)
        if last is not None and last[0].unit is unit and id(last[1]) in inputs and not inside:
            # the call goes on: whatever of its graph runs in a backward does so before its marks
            call = last[0]
            call.marks = last[2]
            unit.in_forward.append(call)
            if unit.sharded:
                self._schedule.ensure_gathered(unit, module)
            unit.runs_here()
            call.last_node = _last_node()
            return None
        call = UnitForward(unit, self._current(), self._outstanding.moment())
        unit.in_forward.append(call)
        self._schedule.ensure_gathered(unit, module)
        unit.runs_here()
        if not inputs:
            call.last_node = _last_node()
            return None
        call.marked = True
        views = _mark(inputs.values(), call, partial(self._post_backward, call))
        call.last_node = _last_node()
        return with_replaced(args, kwargs, dict(zip(inputs, views)))

    def _enter_transformed(self, unit: Unit | None) -> None:
        """A forward under grad, vmap or another transform of torch.func, whose graphs are its
        own: no pass of this engine.
        """
        if unit is None:
            return
        if unit.sharded:
            raise PartitionError(
                f"torch.func goes through {unit.label}, whose parameters are sharded (stage 3): "
                "the backward inside a transform "
                "would read weights that are released by then; use stage 2 for "
                "models under torch.func"
            )
        unit.wait_for_update()

    def gather_on_use(self, unit: Unit) -> bool:
        """Gather ``unit`` for a module that reads a parameter of another one in its forward;
        False outside forwards.
        """
        if not self._nested:
            return False
        if _graph_task() != -1:
            self._enter_backward()
        self._schedule.ensure_gathered(unit)
        self._schedule.reshard_later(unit)  # what reads it now tells of the graph by itself
        return True

    def _current(self) -> RootForward:
        outer = self._outstanding.recomputation if _graph_task() != -1 else self._outer
        assert outer is not None, "a module's forward is under way outside any pass"
        return outer

    def hold(self, unit: Unit, node: torch.autograd.graph.Node) -> None:
        """Keep ``unit``, which is gathered, as long as ``node``, recorded outside the unit's own
        forward, waits for its backward.
        """
        outer = RootForward(whole=self._nested > 0 or _graph_task() != -1)
        _keep(unit, outer)
        node.register_prehook(partial(self._reach, outer))

    def _reach(self, outer: RootForward, grads: Any = None) -> None:
        """The backward under way goes back through ``outer``: what it reads must be here, also
        the second time.
        """
        self._enter_backward()
        if not outer.whole:
            self._on_part()
        if outer in self._reached:
            return
        self._reached.add(outer)
        for call in outer.calls:
            call.unit.pending.add(call)  # again, if this is not the first backward over its graph
        for unit in outer.reads:
            unit.pinned_by.add(outer)
            self._schedule.ensure_gathered(unit)

    def _leave(
        self, unit: Unit | None, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if transformed():
            return
        inside = _graph_task() != -1
        raised = sys.exc_info()[1] if output is None else None
        self._nested = max(0, self._nested - 1)
        if spans.logs:
            spans.ended(module)
        if unit is not None and unit.in_forward:
            call = unit.in_forward.pop()
            if call is not None:
                call.left = self._outstanding.moment()
                self._watch_output(call, module, output, raised)
                if inside:
                    self._last = None
            if not inside:
                self._schedule.reshard_later(unit)
        if self._nested == 0 and not inside:
            outer, self._outer, self._last = self._outer, None, None
            if outer is not None and not torch.is_grad_enabled():
                self._no_longer({outer})
            elif (
                outer is not None
                and not outer.tracked
                and any(outer in each.pinned_by for each in self._units)
            ):
                self._untracked.append(outer)
                self._no_longer(set(self._untracked[:-FORWARDS_TOLD_APART]))
                del self._untracked[:-FORWARDS_TOLD_APART]
            self._schedule.note(raised)
            if raised is not None:
                self._schedule.abandon()  # the forward has raised
            else:
                self._schedule.end(keep_last=torch.is_grad_enabled())

    def _watch_output(
        self,
        call: UnitForward,
        module: nn.Module,
        output: Any,
        raised: BaseException | None,
    ) -> None:
        marks, call.marks = call.marks, ()
        self._last, last = None, call.last_node  # later ones are the forward's
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            node = tensor.grad_fn
            if node is not None:
                last = max(last, node._sequence_nr())
                node.register_prehook(partial(self._pre_backward, call, module, marks))
                self._last = call, tensor, marks
            elif tensor.requires_grad:
                # a parameter itself: whoever gets it reads it again in backward
                _keep(call.unit, call.outer)
        if self._last is not None:
            if not call.outer.tracked:
                call.outer.tracked = True
                self._older.add(call.outer)
            call.outer.calls.add(call)
            call.unit.pending.add(call)
        # What was recorded after it has left another way: into an object, a dict, ``self``. Its
        # backward comes before the hooks.
        if raised is None and (call.marked or call.unit.trainable) and last < _last_node():
            _keep(call.unit, call.outer)

    def _pre_backward(
        self, call: UnitForward, module: nn.Module, marks: Sequence[Node], grads: Any
    ) -> None:
        self._enter_backward()
        if call not in call.unit.in_backward:
            self._start_backward(call, marks)
        elif not call.unit.sharded:
            return
        self._schedule.ensure_gathered(call.unit, module)
        if spans.logs:
            spans.ended(call)
            spans.began(call, "backward", call.unit.name_of(module))

    def _start_backward(self, call: UnitForward, marks: Sequence[Node]) -> None:
        if torch.is_grad_enabled() and call.unit.sharded:
            raise PartitionError(
                "create_graph=True at stage 3: the second backward would read weights of "
                f"{call.unit.label} that the first has released; "
                "use stage 2 for losses with gradients of gradients"
            )
        if not call.outer.whole or call.outer not in self._reached:
            self._reach(call.outer)
        self._pass(call, call.left)
        if marks:
            call.marks_left = sum(map(torch._C._will_engine_execute_node, marks))
        call.unit.in_backward.add(call)
        self._outstanding.starts(call)

    def _post_backward(self, call: UnitForward, *_: Any) -> None:
        self._enter_backward()
        unit = call.unit
        if spans.logs:
            spans.ended(call)
        unit.pending.discard(call)
        unit.in_backward.discard(call)
        self._schedule.reshard_later(unit)
        if len(self._tasks) > 1 and call.outer is self._outstanding.recomputation:
            self._outstanding.reruns_seen = True
            unit.reruns = max(0, unit.reruns - 1)
        if not self._outstanding.awaits_calls(unit) and not self._outstanding.awaits_reruns(
            unit, False
        ):
            self._reducer.ready(unit)
        self._pass(call, call.began)

    def _pass(self, call: UnitForward, moment: int) -> None:
        """The backward has come to ``moment``: reduce what is complete by that."""
        if len(self._tasks) == 1 and call.outer is not self._outstanding.recomputation:
            if self._first:
                self._first = False
                if any(
                    outer is not call.outer and outer.began < moment and outer.pending
                    for outer in self._older
                ):
                    self._reducer.wait_for_older()
            for unit in self._outstanding.reach(moment):
                self._reducer.ready(unit)
        self._reducer.advance()
        self._schedule.let_go(self._reducer.depth, self._awaits)

    def _awaits(self, unit: Unit) -> bool:
        return self._outstanding.awaits(unit, self._reducer.learns)

    def _enter_backward(self) -> None:
        task = _graph_task()
        if (
            task == -1
            or (self._tasks and self._tasks[-1][0] == task)
            or any(task == known for known, _ in self._tasks)
        ):
            return
        if self._tasks and self._tasks[0][1]() is None:
            self._abandon_backward()
        if not self._tasks:
            self._begin()
        callback = partial(self._leave_backward, task)
        self._tasks.append((task, weakref.ref(callback)))
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _begin(self) -> None:
        kind = (
            "backward",
            *(
                (forward, min(count, FORWARDS_TOLD_APART))
                for forward, count in self._forwards.items()
            ),
        )
        self._forwards.clear()
        recomputation = RootForward(True)
        self._outstanding.begin(recomputation)
        self._reached, self._first, self._last = {recomputation}, True, None
        self._on_begin()
        # Without sharded parameters a forward is nobody else's affair: ranks may have run different
        # numbers of them.
        key = (*kind, self._schedule.resident) if self._schedule.gathers else None
        self._schedule.begin(kind, backward=True)
        self._reducer.begin(key)

    def _leave_backward(self, task: int) -> None:
        known = [number for number, _ in self._tasks]
        if task not in known:
            return
        del self._tasks[known.index(task) :]
        if self._tasks:
            return  # a backward inside a backward: reentrant checkpointing
        self._end()

    def _end(self) -> None:
        self._reducer.note_unfinished()
        self._forget_calls()
        # Gathers first, because other ranks need them before they launch what this one is about to
        # wait for.
        recorded = self._schedule.recording
        self._schedule.issue_rest()
        self._reducer.finish(recorded)
        self._schedule.end(keep_last=False)

    def notice_broken(self) -> None:
        """Called from outside forward and backward: put away what an exception there has left
        open.
        """
        if _graph_task() != -1:
            return
        if self._tasks:
            self._abandon_backward()

    def reset(self) -> None:
        """As :meth:`notice_broken`, where no forward can be under way: KeyboardInterrupt passes
        by the hooks on leaving.
        """
        self.notice_broken()
        if self._nested and _graph_task() == -1:
            self._nested, self._outer, self._last = 0, None, None
            for unit in self._units:
                unit.in_forward.clear()
            self._schedule.abandon()

    def _abandon_backward(self) -> None:
        """A backward was broken by an exception: nothing of it may count."""
        self._tasks = []
        self._forget_calls()
        self._reducer.abandon()
        self._schedule.abandon()

    def _forget_calls(self) -> None:
        for unit in self._units:
            for call in unit.in_backward:
                unit.pending.discard(call)
            unit.in_backward.clear()
        # Of the forwards that no hook tells of, a backward is taken to be the oldest one's.
        self._no_longer({*self._reached, *self._untracked[:1]})
        self._reached.clear()
        del self._untracked[:1]
        self._outstanding.end()
        if not any(unit.pending for unit in self._units):
            for unit in self._units:
                unit.reruns = 0  # of forwards that no checkpoint runs again

    def _no_longer(self, calls: set[RootForward]) -> None:
        for unit in self._units:
            if unit.pinned_by:
                unit.pinned_by -= calls
