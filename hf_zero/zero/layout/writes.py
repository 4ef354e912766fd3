"""Writes of a script to parameters outside the engine: in place, through ``parameter.data``, or by
assignment to it.

[Note: how a write is noticed]
torch counts the changes of a tensor in ``_version``. A parameter has its own count although its
memory is a view of a flat buffer, so the engine's writes to the buffer do not change the count.
``parameter.data`` has a new count each time it is read; the engine therefore returns one alias per
parameter, whose views share one count. So a step compares one sum of integers per flat buffer, and
examines single parameters only after a write. An update of the engine increments the parameters'
own counts, too, so that autograd raises for a backward after it over a graph from before it.

[Note: whose values count]
Each rank keeps its own part of a write, as of everything else. Ranks that write the same values, as
in a script that is the same on all of them, lose nothing; if the values differ, the rank that owns
an element decides, and all ranks have its value after the next gather. Unchanged elements keep
their master weights in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class UserWrites:
    """Count the writes to the parameters of one flat buffer."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self._parameters = dict(parameters)
        self._members = list(self._parameters.values())
        self._aliases: dict[str, torch.Tensor] = {}
        self._updates = 0  # the engine's updates, counted in each parameter's ``_version``
        self.accept()

    @property
    def aliases(self) -> int:
        """Number of tensors here that share the memory of the flat buffer."""
        return len(self._aliases)

    def alias(self, name: str, view: torch.Tensor) -> torch.Tensor:
        """Return a tensor over ``view``, the memory of parameter ``name``, whose writes are
        counted.
        """
        with torch.inference_mode(False):
            if name not in self._aliases:
                self._aliases[name] = _data(view)  # a new alias has count 0
            return self._aliases[name].detach()

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
        torch._C._increment_version(self._members)
        self._updates += 1

    def drop_aliases(self) -> None:
        """Drop the aliases before the memory of the parameters is freed; no writes may follow."""
        if self._aliases:
            self._aliases.clear()
            self.accept()

    def _sum(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            total = sum(map(_version, self._members)) - self._updates * len(self._members)
        return total + sum(map(_version, self._aliases.values())) if self._aliases else total

    def _count(self, name: str) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            count = _version(self._parameters[name]) - self._updates
        return count + _version(self._aliases[name]) if name in self._aliases else count
