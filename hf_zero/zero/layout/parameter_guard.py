"""The classes of the parameters of a gathered unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter import (
    LiveParameter,
    OwnedParameter,
    WatchedParameter,
    become,
    given_class,
    owned_class,
)


class ParameterGuard:
    """The classes of the parameters of a gathered unit: ``LiveParameter`` while their own module
    runs, else ``WatchedParameter``, which records graphs and views taken of them.
    """

    def __init__(self, modules: Sequence[nn.Module], sharded: Sequence[FlatBuffer]):
        self._members = [parameter for flat in sharded for parameter in flat.members]
        # With several modules: the parameters of each, and the modules that are running or ran
        # last.
        owned = set(map(id, self._members))
        self._own = {
            module: [p for p in module.parameters() if id(p) in owned]
            for module in (modules if len(modules) > 1 else ())
        }
        self._bare: set[nn.Module] = set()
        self._watchers = 0

    @property
    def watched(self) -> bool:
        """Whether a script holds the values through :meth:`watch`."""
        return self._watchers > 0 and bool(self._members)

    @property
    def gathered_class(self) -> type[OwnedParameter]:
        """The class of newly gathered parameters."""
        return WatchedParameter if self._own else LiveParameter

    def on(self) -> None:
        """Watch all gathered parameters: their own module is not running."""
        if not self._own:
            _become(LiveParameter, WatchedParameter, self._members)
        for module in self._bare:
            _become(LiveParameter, WatchedParameter, self._own[module])
        self._bare.clear()

    def off(self, module: nn.Module | None = None) -> None:
        """Stop watching the parameters of ``module`` while it runs; None: those of a unit with one
        module.
        """
        if self._watchers:
            return
        if not self._own:
            _become(WatchedParameter, LiveParameter, self._members)
        elif module is not None and module not in self._bare:
            self._bare.add(module)
            _become(WatchedParameter, LiveParameter, self._own[module])

    def watch(self) -> None:
        """Watch all parameters until :meth:`unwatch`, whatever module runs."""
        self._watchers += 1
        if self._watchers == 1:
            self.on()

    def unwatch(self) -> None:
        self._watchers -= 1

    def released(self) -> None:
        """Record the release: no parameter is a ``LiveParameter`` any more."""
        self._bare.clear()


def _become(
    before: type[OwnedParameter],
    after: type[OwnedParameter],
    parameters: Sequence[nn.Parameter],
) -> None:
    for parameter in parameters:
        kind = type(parameter)
        if kind is before:
            parameter.__class__ = after
        elif kind is owned_class(before, given_class(parameter)):
            become(parameter, after)
