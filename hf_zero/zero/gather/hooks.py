"""Hooks on modules: pre-forward and post-forward ones gather and release units, and register hooks
on the autograd graph that mark the beginning and the end of a unit's backward.

[Note: the end of a unit's backward]
Autograd runs ready nodes in reverse order of creation. The mark on a unit's inputs is created
before every node of its forward, so its backward runs after all of them. ``AccumulateGrad`` nodes
have the highest priority and run as soon as they are ready. So when the mark's backward runs,
gradients are complete and no saved weight will be read again. If no input requires grad there is no
mark, and the unit's backward ends with the whole backward.

If the input of a module is the output that another module of its unit has just returned, the two
are chained. Chained modules of one unit form one call; only the first one's inputs are marked. A
backward may begin at the outputs of any of them.

An output whose node is older than the forward, such as an input that is returned, is replaced by a
view: the hooks on outputs hold the marks, and marks lead to older nodes.

Pending calls are kept in weak sets, not counted, so a dropped graph stops being pending by itself.
Recomputation (activation checkpointing) runs forwards inside a backward; a forward there never
releases.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from hf_zero.device import spans
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.backward_tracker import BackwardTracker, graph_task, keep_for_backward
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter import any_raw_grad
from hf_zero.zero.layout.tree import (
    is_cache,
    map_tensors,
    requiring_grad,
    tensors_in,
    transformed,
    with_replaced,
)
from hf_zero.zero.layout.unit import OutermostForward, Unit, UnitCall
from hf_zero.zero.layout.walk import named_modules_of

_module = itemgetter(0)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The sequence number of this thread's next autograd node; a backward runs higher numbers first.
_next_node: Callable[[], int] = torch.autograd._get_sequence_nr
# With a cache or this argument a step of generate runs other blocks than a whole forward, and has a
# plan of its own. Other arguments do not select a plan: ranks may differ in them.
ENCODED = "encoder_outputs"
# Returns the modules that no rank runs in an outermost forward.
ModulesLeftOut = Callable[[OutermostForward], Collection[nn.Module]]


def _mark(
    inputs: Iterable[torch.Tensor], call: UnitCall, over: Callable[..., None]
) -> Sequence[torch.Tensor]:
    """Return views of ``inputs``, which a block may change in place, and call ``over`` once all
    their gradients are known.

    Not every input takes part in every backward: those that do are counted when the backward of
    ``call`` begins. The views are hidden from dispatch modes: selective checkpointing compares the
    operations of a forward with those of its recomputation, which marks other calls.
    """
    views, nodes = [], []
    with _disable_current_modes() if _modes() else spans.NOTHING:
        for tensor in inputs:
            view = tensor.view_as(tensor)
            views.append(view)
            if view.grad_fn is not None:
                nodes.append(view.grad_fn)
    if len(nodes) == 1:
        nodes[0].register_hook(over)
        return views
    call.marks = nodes

    def passed(*_: object) -> None:
        # negative if a backward began inside the forward: no hook on its outputs has set it
        call.marks_left -= 1
        if call.marks_left == 0:
            over()

    for node in nodes:
        node.register_hook(passed)
    return views


def _accumulated(tracker: weakref.ref[BackwardTracker], parameter: torch.Tensor) -> None:
    """Begin a backward at a gradient that reaches no unit's hook, such as the gradient of a penalty
    on the weights.
    """
    alive = tracker()
    if alive is not None:
        alive.enter()


class Hooks:
    """Connect the modules of ``model`` with the schedule of gathers and the backward tracker."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        tracker: BackwardTracker,
        refuse: Callable[[str], None],
    ):
        """``refuse``: raises where an outermost forward may not begin."""
        self._model = model
        self._refuse = refuse
        self._units = list(units)
        self._schedule = schedule
        self._tracker = tracker
        # hooked modules whose forward is running, outermost first, and the exception that was being
        # handled as each began
        self._running: list[tuple[nn.Module, BaseException | None]] = []
        self._root: OutermostForward | None = None  # the forward under way
        # the last call that has ended, an output of it, and the marks of its inputs
        self._last: tuple[UnitCall, torch.Tensor, Sequence[Node]] | None = None
        # called with each outermost forward with a graph
        self.left_out_by: list[ModulesLeftOut] = []
        self.forwards = 0  # passes with gradients
        # by module: parameters that no other module holds, as bits in flat buffers
        self._held: dict[nn.Module, list[tuple[FlatBuffer, int]]] = {}
        self._removable: list[RemovableHandle] = []
        self._watches = False
        self._training = [
            parameter
            for unit in units
            for flat in unit.trainable_flats
            for parameter in flat.members
        ]
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        names = {module: name for name, module in named_modules_of(model)}
        around: dict[nn.Module, Unit | None] = {
            module: unit for unit in self._units for module in unit.modules.values()
        }
        root = self._units[0]
        in_root = {id(parameter) for flat in root.flats for parameter, _ in flat.items}
        for module in names:
            # A script may call a submodule directly, so each module with a parameter of the root
            # gathers the root.
            if module not in around and any(
                id(p) in in_root for p in module._parameters.values() if p is not None
            ):
                around[module] = root
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
        self._removable += [
            parameter.register_post_accumulate_grad_hook(accumulated)
            for parameter in self._training
        ]

    def reduce_stray_gradients(self) -> None:
        """Take in ``.grad`` left by a backward that our hooks did not see, from a penalty on the
        weights, or assigned by a script (collective).

        Called outside forward and backward, at the same places of the script on every rank.
        """
        if (
            not self._tracker.tasks
            and not self._running
            and graph_task() == -1
            and any_raw_grad(self._training)
        ):
            self._tracker.reduce_stray_gradients()

    @contextmanager
    def announced(self, loss: torch.Tensor) -> Iterator[None]:
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

    def _pre_forward(
        self,
        unit: Unit | None,
        name: str,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        # pre-forward hook: gather ``unit`` and mark its inputs for the end of its backward
        if _transforms() and transformed():
            self._pre_forward_transformed(unit)
            return None
        tracker = self._tracker
        inside = graph_task() != -1
        if inside:
            tracker.enter()
        elif tracker.tasks:
            tracker.abort_broken_backward()
        grads = torch.is_grad_enabled()
        if not self._running and not inside:
            self._begin_pass(name, module, kwargs, grads)
        self._running.append((module, sys.exc_info()[1]))
        last, self._last = self._last, None
        if unit is None:
            return None
        if inside:
            tracker.refuse_updated(unit)
        if spans.blocks:
            spans.began(module, "forward", name or unit.label)
        call, continues, inputs = None, False, requiring_grad(args, kwargs) if grads else {}
        if not grads:
            if module.training and unit.trainable_flats and not inside:
                unit.forwards.expected_reruns += 1
        elif (
            last is not None
            and last[0].unit is unit
            and id(last[1]) in inputs
            and last[0] in unit.forwards.pending
            and not inside
        ):
            # the call continues: in a backward, all nodes of its graph run before its marks
            call, continues = last[0], True
            call.marks = last[2]
        else:
            root = tracker.remaining.recomputation if inside else self._root
            assert root is not None, "a module's forward is under way outside any pass"
            call = UnitCall(unit, root, tracker.remaining.tick())
        unit.forwards.in_forward.append(call)
        if unit.sharded_flats or not continues:
            self._schedule.ensure_gathered(unit, module)
        if unit.device_of_streams is not None:
            unit.record_compute_stream()
        if call is None:
            return None
        if continues or not inputs:
            call.last_node = _next_node() - 1
            return None
        call.marked = True
        views = _mark(inputs.values(), call, partial(tracker.post_backward, call))
        call.last_node = _next_node() - 1
        return with_replaced(args, kwargs, dict(zip(inputs, views)))

    def _begin_pass(
        self, name: str, module: nn.Module, kwargs: Mapping[str, object], grads: bool
    ) -> None:
        """Begin the forward pass of ``module``, the outermost one, at path ``name`` of the model;
        ``grads``: it records a graph.
        """
        self.reduce_stray_gradients()
        self._refuse("a forward")
        kind: tuple[Hashable, ...] = (name, grads, module.training)
        for key, value in kwargs.items():
            if is_cache(value) or (key == ENCODED and value is not None):
                kind += (key,)
        self._root = OutermostForward(module is self._model, self._tracker.remaining.tick(), name)
        if grads and self.left_out_by:
            self._leave_out(self._root, name)
        self._schedule.begin(kind, left_out=self._root.left_out)
        if grads:
            self.forwards += 1
            self._tracker.add_forward(kind, joint=not self._schedule.between_passes)

    def _pre_forward_transformed(self, unit: Unit | None) -> None:
        """Handle a forward under grad, vmap or another torch.func transform, which has its own
        graphs: it is no pass of this engine.

        Raises PartitionError for sharded units and for modules that compute with changed values.
        """
        if unit is None:
            return
        if unit.sharded_flats:
            raise PartitionError(
                f"torch.func goes through {unit.label}, whose parameters are sharded (stage 3): "
                "the backward inside a transform would read weights that are released by then; use "
                "stage 2 for models under torch.func"
            )
        changed = [flat.computing for flat in unit.flats if flat.computing is not None]
        if changed:
            raise PartitionError(
                f"torch.func goes through {unit.label}, whose modules compute with "
                f"{changed[0].values}, and a transform would see them as they are; apply it to a "
                "model without an engine"
            )
        unit.wait_for_update()

    def gather_on_use(self, unit: Unit) -> bool:
        """Gather ``unit`` for a module that reads another module's parameter in its forward; return
        False outside forwards.
        """
        if not self._running:
            return False
        self._tracker.enter()
        self._tracker.refuse_updated(unit)
        self._schedule.ensure_gathered(unit)
        self._schedule.release_later(unit)  # keep_for_backward() covers a graph recorded on it
        return True

    def _leave_out(self, root: OutermostForward, name: str) -> None:
        """Ask the techniques which modules no rank runs in the outermost forward ``root``, and
        record their units and parameters on it. ``name``: path of the module called, which is never
        dropped.
        """
        modules = {module for left_out in self.left_out_by for module in left_out(root)}
        if name:  # a submodule called directly is kept
            part = self._model.get_submodule(name)
            modules &= {*part.modules()} - {part}
        if modules:
            root.left_out = frozenset(
                unit
                for unit in self._units[1:]
                if unit.modules and all(module in modules for module in unit.modules.values())
            )
            root.idle = self._idle(modules)

    def _idle(self, modules: set[nn.Module]) -> dict[FlatBuffer, int]:
        """Return, by flat buffer, the bits of the parameters that no module outside ``modules``
        holds; each of these counts with its submodules.
        """
        if not modules <= self._held.keys():
            bits = {
                id(parameter): (flat, 1 << index)
                for unit in self._units
                for flat in unit.trainable_flats
                for index, parameter in enumerate(flat.members)
            }
            holders = Counter(
                id(parameter)
                for module in self._model.modules()
                for parameter in module._parameters.values()
            )
            for module in modules - self._held.keys():
                counts = Counter(
                    id(parameter)
                    for part in module.modules()
                    for parameter in part._parameters.values()
                )
                self._held[module] = [
                    bits[key]
                    for key, number in counts.items()
                    if key in bits and number == holders[key]
                ]
        idle: dict[FlatBuffer, int] = {}
        for module in modules:
            for flat, bit in self._held[module]:
                idle[flat] = idle.get(flat, 0) | bit
        return idle

    @property
    def current_root(self) -> OutermostForward | None:
        """The outermost forward under way; in a backward, the one that is recomputed."""
        return self._root if graph_task() == -1 else self._tracker.current_root

    def keep_for_backward(self, unit: Unit, node: torch.autograd.graph.Node) -> None:
        """Keep ``unit`` gathered for the backward of ``node``, which was recorded outside the
        unit's own forward.
        """
        root = OutermostForward(of_whole_model=self.forward_runs or graph_task() != -1)
        keep_for_backward(unit, root)
        node.register_prehook(partial(self._tracker.reach_root, root))

    def _post_forward(
        self, unit: Unit | None, module: nn.Module, args: object, kwargs: object, output: object
    ) -> object:
        # post-forward hook: release ``unit`` later, and watch the outputs for its backward
        if _transforms() and transformed():
            return None
        inside, running = graph_task() != -1, self._running
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
        if begun and unit is not None and unit.forwards.in_forward:
            call = unit.forwards.in_forward.pop()
            if call is not None:
                call.ended_at = self._tracker.remaining.tick()
                # an output beside an exception: the forward has returned, and a later hook raised
                output = output if raised is None else None
                returned = self._watch_output(call, module, output, raised)
                if inside:
                    self._last = None
            if not inside:
                self._schedule.release_later(unit)
        if not running and not inside:
            root, self._root, self._last = self._root, None, None
            if root is not None:
                self._tracker.end_forward(root, torch.is_grad_enabled())
            self._schedule.record_forward_error(raised)
            if raised is not None:
                self._schedule.abort()  # the forward has raised
            else:
                self._schedule.end(keep_last=torch.is_grad_enabled())
        return returned

    def _watch_output(
        self, call: UnitCall, module: nn.Module, output: object, raised: BaseException | None
    ) -> object:
        # Hooks on the outputs of ``call`` begin its backward; a unit that a backward reads at a
        # point our hooks cannot see stays gathered. Return what replaces ``output``, if anything.
        marks, call.marks = call.marks, ()
        self._last, last = None, call.last_node  # nodes after it belong to the forward
        older: dict[int, torch.Tensor] = {}
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            node = tensor.grad_fn
            if node is not None:
                number = node._sequence_nr()
                if marks and number <= call.last_node:
                    older[id(tensor)] = tensor
                    continue
                last = max(last, number)
                node.register_prehook(partial(self._tracker.pre_backward, call, module, marks))
                self._last = call, tensor, marks
            elif tensor.requires_grad:
                # a parameter itself, read again in backward
                keep_for_backward(call.unit, call.root)
        # Nodes recorded after the outputs belong to values returned in another way: in an object, a
        # dict, or ``self``. Their backward runs before the hooks.
        if (
            raised is None
            and (call.marked or call.unit.trainable_flats)
            and last < _next_node() - 1
        ):
            keep_for_backward(call.unit, call.root)
        replaced = self._watch_older(call, module, output, marks, older) if older else None
        if self._last is not None and call not in call.unit.forwards.pending:
            self._tracker.add_call(call)
        return replaced

    def _watch_older(
        self,
        call: UnitCall,
        module: nn.Module,
        output: object,
        marks: Sequence[Node],
        older: Mapping[int, torch.Tensor],
    ) -> object:
        """Return ``output`` with watched views of the tensors ``older``, whose nodes are older than
        the forward.

        A hook on such a node that holds the marks would be a cycle through autograd, which Python's
        garbage collector does not see.
        """
        views: dict[int, torch.Tensor] = {}

        def viewed(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in older:
                return tensor
            if id(tensor) not in views:
                views[id(tensor)] = tensor.view_as(tensor)
            return views[id(tensor)]

        with _disable_current_modes() if _modes() else spans.NOTHING:
            replaced = map_tensors(output, viewed, in_place=True)
        for key, tensor in older.items():
            watched = views.get(key, tensor)
            assert watched.grad_fn is not None
            # One in an object stays: its call ends with the whole backward.
            seen = marks if key in views else ()
            watched.grad_fn.register_prehook(
                partial(self._tracker.pre_backward, call, module, seen)
            )
            if self._last is None:
                self._last = call, watched, marks
        return replaced

    def reset(self) -> None:
        """Abort a forward or backward that an exception has left open; none may be running.
        KeyboardInterrupt bypasses the post-forward hooks.
        """
        if self._tracker.tasks:
            self._tracker.abort_broken_backward()
        if self._running and graph_task() == -1:
            self._running, self._root, self._last = [], None, None
            for unit in self._units:
                unit.forwards.in_forward.clear()
            self._schedule.abort()
