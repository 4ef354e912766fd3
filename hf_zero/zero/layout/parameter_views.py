"""The ``nn.Parameter`` objects of flat buffers: the memory they point at, their class in each
state, the writes of scripts to them, and the gradients that autograd leaves on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_

import torch
from torch import nn
from torch.autograd.graph import increment_version

from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.parameter import (
    LiveParameter,
    OwnedParameter,
    ReleasedParameter,
    WatchedParameter,
    become,
    given_class,
    owned_class,
    placeholder,
)

_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class ParameterViews:
    """The parameters of one flat buffer, by name and in buffer order."""

    def __init__(self, spec: FlatSpec, parameters: dict[str, nn.Parameter]):
        self._spec = spec
        self.by_name = parameters
        self.members = [parameters[slot.name] for slot in spec.layout.slots]
        self.views: dict[str, torch.Tensor] = {}  # of the whole buffer, by name
        # names of parameters whose requires_grad differs from that at initialize
        self.switched: frozenset[str] = frozenset()
        self._placeholders: dict[str, torch.Tensor] = {}
        # Templates of the parameters and of the padding between and after them, in buffer order,
        # and the places of either among them.
        self.templates: list[torch.Tensor] = []
        self.members_at: list[int] = []
        self.padding_at: list[int] = []
        # classes of ``members``, by state
        self._classes: dict[type[OwnedParameter], list[type[OwnedParameter]]] = {}
        # Weak references make torch.utils.swap_tensors refuse these parameters: it would exchange
        # the view of the flat buffer.
        self._no_swaps = [weakref.ref(parameter) for parameter in parameters.values()]

    def take(self, flat: object, full: torch.Tensor) -> None:
        """Make the parameters views of ``full`` [padded], the buffer of ``flat``, which must hold
        their values.
        """
        at_stage_3 = self._spec.sharded or self._spec.persistent
        kind = LiveParameter if at_stage_3 else OwnedParameter
        self.lay(full)
        dtype = self._spec.dtype
        for index, (parameter, slot) in enumerate(zip(self.members, self._spec.layout.slots)):
            self._placeholders[slot.name] = placeholder(dtype, slot.shape, full.device)
            become(parameter, kind)
            parameter.__dict__.update(
                _hf_zero_flat=flat,
                _hf_zero_name=slot.name,
                _hf_zero_id=self._spec.index * 1_000_000 + index,
            )
            _set_data(parameter, self.views[slot.name])
        self._divide()

    def _divide(self) -> None:
        """Set the templates of the parts of the buffer."""
        layout, any_value = self._spec.layout, torch.zeros(())
        ranges = [(slot.offset, slot.end, slot.shape) for slot in layout.slots]
        ranges += [(start, stop, (stop - start,)) for start, stop in layout.padding]
        # an empty parameter is in front of what begins at its place
        order = sorted(range(len(ranges)), key=lambda at: (*ranges[at][:2], at))
        self.templates = [any_value.expand(ranges[at][2]) for at in order]
        index_of = {at: index for index, at in enumerate(order)}
        self.members_at = [index_of[at] for at in range(len(layout.slots))]
        self.padding_at = [index_of[at] for at in range(len(layout.slots), len(ranges))]

    def lay(self, full: torch.Tensor) -> None:
        """Set ``views`` to views of ``full``."""
        self.views.update(self.views_of(full))

    def views_of(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters by name, as views of ``buffer`` [padded]."""
        return {
            slot.name: buffer[slot.offset : slot.end].view(slot.shape)
            for slot in self._spec.layout.slots
        }

    def point_at(self, views: Mapping[str, torch.Tensor]) -> None:
        """Set each parameter's data to its view among ``views``; its class stays."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, slot in zip(self.members, self._spec.layout.slots):
                _set_data(parameter, views[slot.name])

    def point_at_full(self, kind: type[OwnedParameter]) -> None:
        """Set each parameter's data to its view of the gathered buffer, its class to ``kind``."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, handle_class, view in zip(
                self.members, self._classes_of(kind), self.views.values()
            ):
                parameter.__class__ = handle_class
                _set_data(parameter, view)

    def point_at_nothing(self) -> None:
        """Set each parameter's data to its placeholder, and its class to ReleasedParameter."""
        with torch._C.DisableTorchFunctionSubclass():
            released = self._classes_of(ReleasedParameter)
            for parameter, handle_class, placeholder in zip(
                self.members, released, self._placeholders.values()
            ):
                _set_data(parameter, placeholder)
                parameter.__class__ = handle_class

    def cast(self, name: str, dtype: torch.dtype) -> None:
        """Give the released parameter ``name`` another dtype for the engine after this one."""
        former = self._placeholders[name]
        self._placeholders[name] = placeholder(dtype, former.shape, former.device)
        with torch._C.DisableTorchFunctionSubclass():
            _set_data(self.by_name[name], self._placeholders[name])

    def _classes_of(self, kind: type[OwnedParameter]) -> list[type[OwnedParameter]]:
        # the original classes do not change
        if kind not in self._classes:
            self._classes[kind] = [
                owned_class(kind, given_class(parameter)) for parameter in self.members
            ]
        return self._classes[kind]

    def turn(self, before: type[OwnedParameter], after: type[OwnedParameter]) -> None:
        """Change the class of parameters in state ``before`` to state ``after``."""
        for parameter, old, new in zip(
            self.members, self._classes_of(before), self._classes_of(after)
        ):
            if type(parameter) is old:
                parameter.__class__ = new

    def switch(self, name: str) -> None:
        """Record that requires_grad of ``name`` was switched."""
        self.switched ^= {name}

    def restore(self) -> bool:
        """Make whole parameters plain ones again, sharded ones with memory of their own. Return
        whether none is left released.
        """
        for parameter, slot in zip(self.members, self._spec.layout.slots):
            if not isinstance(parameter, ReleasedParameter):
                if self._spec.sharded:
                    _set_data(parameter, self.views[slot.name].clone())
                forget(parameter)
        released = any(isinstance(parameter, ReleasedParameter) for parameter in self.members)
        if not released:
            self.allow_swaps()
        return not released

    def allow_swaps(self) -> None:
        """Let torch.utils.swap_tensors exchange the parameters, which are no views any more."""
        self._no_swaps.clear()

    def drop_memory(self) -> None:
        """Drop all views of the buffer."""
        self.views.clear()
        self._placeholders.clear()
        self.allow_swaps()


def forget(parameter: nn.Parameter) -> None:
    """Restore the class of ``parameter`` before the engine, with its current data."""
    for key in ("_hf_zero_flat", "_hf_zero_name", "_hf_zero_id"):
        parameter.__dict__.pop(key, None)
    parameter.__class__ = given_class(parameter)


class ParameterGuard:
    """The gathered values of a unit, as its flat buffers and its parameters see them, and the
    classes of its ``members``: ``LiveParameter`` while their own module runs, else
    ``WatchedParameter``, which records graphs and views taken of them.
    """

    def __init__(self, modules: Sequence[nn.Module], members: Sequence[nn.Parameter]):
        self._members = list(members)
        self.pins = 0  # scripts that keep the values gathered
        self.exact = True  # the last gather was for uncompressed and unchanged values
        self.aliased = False  # views of the values may be alive
        # With several modules: the parameters of each, and the modules that are running or ran
        # last.
        owned = set(map(id, self._members))
        self._own = {
            module: [p for p in module.parameters() if id(p) in owned]
            for module in (modules if len(modules) > 1 else ())
        }
        self._bare: set[nn.Module] = set()
        self._watchers = 0
        self._watches = False  # with one module: its gathered parameters are watched
        # the class of newly gathered parameters
        self.gathered_class: type[OwnedParameter] = WatchedParameter if self._own else LiveParameter

    @property
    def watched(self) -> bool:
        """Return whether a script holds the values through :meth:`watch`."""
        return self._watchers > 0 and bool(self._members)

    def module_ended(self) -> None:
        """Watch all gathered parameters: their own module is not running."""
        if not self._own and not self._watches:
            _become(LiveParameter, WatchedParameter, self._members)
            self._watches = True
        for module in self._bare:
            _become(LiveParameter, WatchedParameter, self._own[module])
        self._bare.clear()

    def module_runs(self, module: nn.Module | None) -> None:
        """Stop watching the parameters of ``module`` while it runs; None: the module of a unit that
        has only one.
        """
        if self._watchers:
            return
        if self._watches:
            _become(WatchedParameter, LiveParameter, self._members)
            self._watches = False
        elif self._own and module is not None and module not in self._bare:
            self._bare.add(module)
            _become(WatchedParameter, LiveParameter, self._own[module])

    def watch(self) -> None:
        """Watch all parameters until :meth:`unwatch`, whatever module runs."""
        self._watchers += 1
        if self._watchers == 1:
            self.module_ended()

    def unwatch(self) -> None:
        self._watchers -= 1

    def mark_aliased(self) -> None:
        """Record that views of the gathered values exist (``p.detach()``, ``p.t()``): their storage
        must not be freed.
        """
        self.aliased = True

    def released(self) -> None:
        """Record the release: no parameter is live, watched or viewed any more."""
        self._bare.clear()
        self._watches = self.aliased = False


def _become(
    before: type[OwnedParameter], after: type[OwnedParameter], parameters: Sequence[nn.Parameter]
) -> None:
    for parameter in parameters:
        kind = type(parameter)
        if kind is before:
            parameter.__class__ = after
        elif kind is owned_class(before, given_class(parameter)):
            become(parameter, after)


class UserWrites:
    """Count the writes to the parameters of one flat buffer."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self._parameters = dict(parameters)
        self._members = list(self._parameters.values())
        self._aliases: dict[str, torch.Tensor] = {}
        # views of the aliases that scripts may still have
        self._views: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self.updates = 0  # the engine's updates, counted in each parameter's ``_version``
        self.accept()

    @property
    def aliases(self) -> int:
        """Number of tensors here that share the memory of the flat buffer."""
        return len(self._aliases)

    def alias(self, name: str, view: torch.Tensor) -> torch.Tensor:
        """Return a tensor over ``view``, memory of parameter ``name``, whose writes are counted."""
        with torch.inference_mode(False):
            if name not in self._aliases:
                self._aliases[name] = _data(view)  # a new alias has count 0
            alias = self._aliases[name].detach()
        alive = [other for other in self._views.get(name, ()) if other() is not None]
        self._views[name] = [*alive, weakref.ref(alias)]
        return alias

    def write(self, name: str, view: torch.Tensor, value: torch.Tensor) -> None:
        """Copy ``value`` to ``view``, the memory of parameter ``name``, as a write. Tensors from
        :meth:`alias` keep the former values, in memory of their own: in plain PyTorch the parameter
        moves to other memory.
        """
        former = [
            other for other in (each() for each in self._views.pop(name, ())) if other is not None
        ]
        if former:
            with torch.inference_mode(False):
                former_values = former[0].clone()
                for other in former:
                    _set_data(other, former_values)
            # they share its count
            count = _version(self._aliases.pop(name))
            self._seen[name] -= count
            self._total -= count
        self.alias(name, view).copy_(value)

    def names(self) -> list[str]:
        """Return the parameters written to since :meth:`accept`."""
        if self._sum() == self._total:
            return []
        return [name for name in self._parameters if self._count(name) != self._seen[name]]

    def accept(self) -> None:
        """Mark all writes so far as known."""
        self._seen = {name: self._count(name) for name in self._parameters}
        self._total = self._sum()

    def mark_updated(self) -> None:
        """Record that the engine has changed the parameters: autograd then raises for a backward
        through an older graph, as it does for plain parameters.
        """
        increment_version(self._members)
        self.updates += 1

    def drop_aliases(self) -> None:
        """Drop the aliases before the memory of the parameters is freed; no writes may follow."""
        self._views.clear()
        if self._aliases:
            self._aliases.clear()
            self.accept()

    def _sum(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            total = sum(map(_version, self._members)) - self.updates * len(self._members)
        return total + sum(map(_version, self._aliases.values())) if self._aliases else total

    def _count(self, name: str) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            count = _version(self._parameters[name]) - self.updates
        return count + _version(self._aliases[name]) if name in self._aliases else count


_grad = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_set_grad = torch.Tensor.grad.__set__  # type: ignore[union-attr]


def raw_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return ``raw_grad`` of each. Fast: a step reads every parameter's."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_grad, parameters))


def any_raw_grad(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether autograd has left a gradient on one of ``parameters``."""
    with torch._C.DisableTorchFunctionSubclass():
        return not all(map(is_, map(_grad, parameters), repeat(None)))


def drop_raw_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Clear the gradients of ``parameters``."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            _set_grad(parameter, None)
