"""Writes of scripts to whole parameters past the engine, by torch's counts of changes (the note on
writes in ``flat_buffer.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

import torch
from torch.autograd.graph import increment_version

_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class UserWrites:
    """Count the writes to the parameters of one flat buffer."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self._parameters = dict(parameters)
        self._members = list(self._parameters.values())
        self._aliases: dict[str, torch.Tensor] = {}
        # views of the aliases that scripts may still have
        self._views: dict[str, list[ref[torch.Tensor]]] = {}
        self.updates = 0  # the engine's updates, counted in each parameter's ``_version``
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
            alias = self._aliases[name].detach()
        alive = [other for other in self._views.get(name, ()) if other() is not None]
        self._views[name] = [*alive, ref(alias)]
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
                kept = former[0].clone()
                for other in former:
                    _set_data(other, kept)
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
