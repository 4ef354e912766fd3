"""Bytes of the storages that operations make, while these are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class LiveBytes:
    """Bytes ``now`` of the live storages that operations have made, without those of ``state``."""

    def __init__(self, state: Iterable[torch.Tensor] = ()):
        self.now = 0
        self._made: dict[int, int] = {}
        self._state: set[int] = set()
        for tensor in state:
            self.exclude(tensor.untyped_storage())

    def exclude(self, storage: torch.UntypedStorage) -> None:
        """Regard a storage that no operation has made as state."""
        key = storage._cdata
        if key not in self._made and key not in self._state:
            self._state.add(key)
            weakref.finalize(storage, self._state.discard, key).atexit = False

    def add(self, storage: torch.UntypedStorage) -> bool:
        """Count the storage of a result; return whether it is new."""
        key = storage._cdata
        if key in self._made or key in self._state:
            return False
        self._made[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._subtract, key).atexit = False
        return True

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Regard a storage that an operation has made as state."""
        if storage._cdata in self._made:
            self._subtract(storage._cdata)
            self.exclude(storage)

    def recount(self) -> None:
        """Discard what a simulation has written to ``now``."""
        self.now = sum(self._made.values())

    def _subtract(self, key: int) -> None:
        self.now -= self._made.pop(key, 0)
