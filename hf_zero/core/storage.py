"""Where the shards of this rank live: ``fetch`` a range to the compute device, ``store`` a range back.

The engine above reads and writes shards only through this interface, so that the place is a choice of row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hf_zero.errors import NotBuiltError


class Storage(Protocol):
    """A one-dimensional array of this rank's shards, addressed in elements."""

    dtype: torch.dtype

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` on the compute device: [stop - start]."""
        ...

    def store(self, start: int, values: torch.Tensor) -> None:
        """Write ``values`` (1-D, on the compute device) at ``start``."""
        ...

    @property
    def nbytes(self) -> int: ...


class DeviceStorage:
    """Shards in memory of the compute device: ``fetch`` is a view and costs nothing."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self._memory = torch.zeros(numel, dtype=dtype, device=device)

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        return self._memory[start:stop]

    def store(self, start: int, values: torch.Tensor) -> None:
        own = self._memory[start : start + values.numel()]
        if own.data_ptr() != values.data_ptr() or own.dtype != values.dtype:
            own.copy_(values)

    @property
    def nbytes(self) -> int:
        return self._memory.untyped_storage().nbytes()


ROWS: dict[str, Callable[[int, torch.dtype, torch.device], Storage]] = {"device": DeviceStorage}


def open_storage(row: str, numel: int, dtype: torch.dtype, device: torch.device) -> Storage:
    """Storage of ``numel`` zeros in the place named ``row``."""
    if row not in ROWS:
        raise NotBuiltError(f"storage {row!r} is not built in this version; use one of {sorted(ROWS)} (offload device: none)")
    return ROWS[row](numel, dtype, device)
