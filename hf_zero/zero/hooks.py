"""Hooks on the modules of a model: they begin and end its forward passes, and call the units, which
gather and release themselves (``gather/unit.py``).
"""

from __future__ import annotations

import sys
import weakref
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
from hf_zero.zero.backward_tracker import BackwardTracker, graph_task
from hf_zero.zero.gather.left_out import LeftOutModules
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.gather.unit import LastOutput, OutermostForward, Unit, next_tick
from hf_zero.zero.layout.parameter_views import any_raw_grad
from hf_zero.zero.layout.tree import is_cache, transformed
from hf_zero.zero.layout.walk import named_modules_of

_module = itemgetter(0)
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# With a cache or this argument a step of generate runs other blocks than a whole forward, and has a
# plan of its own. Other arguments do not select a plan: ranks may differ in them.
ENCODED = "encoder_outputs"


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
        self._last: LastOutput | None = None
        self.left_out = LeftOutModules(model, units)
        self.forwards = 0  # passes with gradients
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

    @property
    def current_root(self) -> OutermostForward | None:
        """The outermost forward under way; in a backward, the one that is recomputed."""
        return self._root if graph_task() == -1 else self._tracker.current_root

    # ---- forwards of modules ----

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
        inside = graph_task() != -1
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
        root = tracker.remaining.recomputation if inside else self._root
        return unit.pre_forward(module, args, kwargs, root, last, inside)

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
        self._root = OutermostForward(module is self._model, next_tick(), name)
        if grads and self.left_out.sources:
            self.left_out.record(self._root)
        self._schedule.begin(kind, left_out=self._root.left_out)
        if grads:
            self.forwards += 1
            self._tracker.add_forward(kind, joint=not self._schedule.between_passes)

    def _post_forward(
        self, unit: Unit | None, module: nn.Module, args: object, kwargs: object, output: object
    ) -> object:
        # post-forward hook of ``module``
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
            returned, self._last = unit.post_forward(module, output, raised, inside)
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
        root = OutermostForward(of_whole_model=self.forward_runs or graph_task() != -1)
        unit.keep_for_backward(root)
        node.register_prehook(partial(self._tracker.reach_root, root))

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
    changed = [flat.computing for flat in unit.flats if flat.computing is not None]
    if changed:
        raise PartitionError(
            f"torch.func goes through {unit.label}, whose modules compute with "
            f"{changed[0].values}, and a transform would see them as they are; apply it to a "
            "model without an engine"
        )
