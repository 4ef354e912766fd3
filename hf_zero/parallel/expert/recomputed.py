"""Keep the routes of forwards for their recomputations: a checkpointed segment that runs again in
the backward sends rows to the same ranks as its forward, without communication and without reading
from the device. A token whose gates round differently the second time thus changes no shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.parallel.expert.dispatch import Routes
from hf_zero.zero.gather.model_patches import Stateless

KEPT = "_hf_zero_routes"  # attribute of expert modules: the :class:`_Kept` of their routes
_SEVERAL = object()  # mark of a module that one forward called more than once: routes ambiguous


class RoutesOfForwards(Stateless):
    """Technique of one engine: keep the routes of ``modules`` by forward."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = list(modules)

    def install(self, engine: Any) -> None:
        for module in self._modules:
            module.__dict__[KEPT] = _Kept(engine.backward_pass.hooks)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop(KEPT, None)
        self._modules = []


class _Kept:
    """The routes of one module, by forward. Copies and pickles of it start empty."""

    def __init__(self, hooks: Any = None):
        self._hooks = hooks

    def __reduce__(self) -> Any:
        return _Kept, ()

    def __call__(self, find: Callable[[], Routes]) -> Routes:
        forward = None if self._hooks is None else self._hooks.forward_at_work
        if forward is None:
            return find()
        held = forward.drawn.get(self)
        if torch._C._current_graph_task_id() != -1:  # inside a backward: a recomputation
            return held if isinstance(held, Routes) else find()
        found = find()
        forward.drawn[self] = found if held is None else _SEVERAL
        return found
