"""The hooks on modules and on the autograd graph: when a unit is needed, when its backward begins and when it is over.

[Note: the end of a unit's backward]
Autograd runs ready nodes in reverse order of creation. The mark on a unit's inputs is made before every node of its
forward, so its backward runs after all of them: gradients are complete and no saved weight will be read again. Where no
input requires grad there is no mark, and the end of the whole backward is taken instead.

Calls are tokens in sets, not counts: a forward that is dropped takes its token with it. Recomputation (activation
checkpointing) runs forwards inside a backward; a forward there never releases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.core.grads import GradientReducer
from hf_zero.core.schedule import Schedule
from hf_zero.core.tree import map_tensors, tensors_in
from hf_zero.core.unit import Call, Unit

FORWARDS_TOLD_APART = 4  # more forwards of one kind before a backward share a plan


def _graph_task() -> int:
    return torch._C._current_graph_task_id()


class _Mark(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that the unit's backward is over."""

    @staticmethod
    def forward(ctx: Any, over: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.over = over
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.over()
        return (None, *grads)


class Hooks:
    """Connects units with the schedule of gathers and the reducer of gradients."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        reducer: GradientReducer,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ):
        self._units = list(units)
        self._schedule = schedule
        self._reducer = reducer
        self._tasks: list[int] = []  # graph tasks under way, outermost first
        self._nested = 0  # hooked modules whose forward is under way
        self._forwards: Counter[Hashable] = Counter()  # forwards since the last backward
        self._removable: list[Any] = []
        self._on_begin, self._on_end = on_begin, on_end
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        around: dict[nn.Module, Unit | None] = {unit.module: unit for unit in self._units}
        root = self._units[0]
        in_root = {id(parameter) for flat in root.flats for parameter, _ in flat.items}
        for module in model.modules():
            # People call parts of models: whoever owns a parameter of the root unit gathers it.
            if module not in around and any(id(p) in in_root for p in module._parameters.values() if p is not None):
                around[module] = root
        for cut in self._units:
            path = cut.name.split(".")
            for depth in range(len(path)):
                around.setdefault(model.get_submodule(".".join(path[:depth])), None)
        for module, unit in around.items():
            self._removable += [
                module.register_forward_pre_hook(partial(self._enter, unit, names[module]), prepend=True, with_kwargs=True),
                module.register_forward_hook(partial(self._leave, unit), with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable = []

    @property
    def in_backward(self) -> bool:
        return bool(self._tasks)

    def _enter(self, unit: Unit | None, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inside = _graph_task() != -1
        if inside:
            self._enter_backward()
        elif self._tasks:
            self._abandon_backward()
        if self._nested == 0 and not inside:
            kind = (name, torch.is_grad_enabled(), module.training)
            self._schedule.begin(kind)
            if torch.is_grad_enabled():
                self._forwards[kind] += 1
        self._nested += 1
        if unit is None:
            return None
        call = Call(unit) if torch.is_grad_enabled() else None
        unit.open.append(call)
        self._schedule.need(unit)
        if call is None:
            return None
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            return None
        call.marked = True
        marked = _Mark.apply(partial(self._post_backward, call), *inputs)
        replaced = dict(zip(map(id, inputs), marked))
        return map_tensors((args, kwargs), lambda tensor: replaced.get(id(tensor), tensor))

    def _leave(self, unit: Unit | None, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside = _graph_task() != -1
        self._nested = max(0, self._nested - 1)
        if unit is not None and unit.open:
            call = unit.open.pop()
            if call is not None and output is not None:
                self._watch_output(call, output)
            if not inside:
                self._schedule.idle(unit)
        if self._nested == 0 and not inside:
            if output is None:
                self._schedule.abandon()
            else:
                self._schedule.end(keep_last=torch.is_grad_enabled())

    def _watch_output(self, call: Call, output: Any) -> None:
        unknown: list[Any] = []
        hooked = False
        for tensor in tensors_in(output, unknown):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._pre_backward, call))
                hooked = True
        if hooked:
            call.unit.pending.add(call)
        elif unknown and (call.marked or call.unit.trainable):
            call.unit.stays = True

    def _pre_backward(self, call: Call, grad: torch.Tensor) -> None:
        self._enter_backward()
        call.unit.active.add(call)
        self._schedule.need(call.unit)

    def _post_backward(self, call: Call) -> None:
        self._enter_backward()
        unit = call.unit
        unit.pending.discard(call)
        unit.active.discard(call)
        self._schedule.idle(unit)
        if not unit.pending and not unit.active:
            self._reducer.ready(unit)

    def _enter_backward(self) -> None:
        task = _graph_task()
        if task == -1 or task in self._tasks:
            return
        if not self._tasks:
            kind = ("backward", *((forward, min(count, FORWARDS_TOLD_APART)) for forward, count in self._forwards.items()))
            self._forwards.clear()
            self._on_begin()
            key = (*kind, self._schedule.resident)
            self._schedule.begin(kind, backward=True)
            self._reducer.begin(key, self._schedule.recording)
        self._tasks.append(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._leave_backward, task))

    def _leave_backward(self, task: int) -> None:
        if task not in self._tasks:
            return
        del self._tasks[self._tasks.index(task) :]
        if self._tasks:
            return  # a backward inside a backward: reentrant checkpointing
        self._forget_calls()
        # Gathers first: while the order is recorded, another rank may still need this one to join them.
        self._schedule.end(keep_last=False)
        self._reducer.finish()
        self._on_end()

    def _abandon_backward(self) -> None:
        """A backward was broken by an exception: nothing of it may count."""
        self._tasks = []
        self._forget_calls()
        self._reducer.abandon()
        self._schedule.abandon()

    def _forget_calls(self) -> None:
        for unit in self._units:
            for call in unit.active:
                unit.pending.discard(call)
            unit.active.clear()
            unit.stays = False
