"""Where the shards of this rank live: ``fetch`` a range to the compute device, ``store`` a range
back.

The engine above reads and writes shards only through this interface, so that the place is a choice
of row. Files are a row of their own (``storage_in_files.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hf_zero.device import kinds


class Storage(Protocol):
    """A one-dimensional array of this rank's shards, addressed in elements."""

    dtype: torch.dtype

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` on the compute device: [stop - start].

        Not to be written: it may be a copy.
        """
        ...

    def fetch_into(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, on the compute device) with the elements from ``start`` on, in the
        order of the current stream.
        """
        ...

    def ahead(self, start: int, stop: int) -> None:
        """Say that these elements will be fetched soon."""
        ...

    def open(self, start: int, stop: int) -> torch.Tensor:
        """Memory to be filled with new elements ``[start, stop)`` and then given to
        :meth:`store`.
        """
        ...

    def store(self, start: int, values: torch.Tensor) -> None:
        """Write ``values`` (1-D, on any device, of any dtype) at ``start``."""
        ...

    def in_host_memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Elements ``[start, stop)`` where the host can write them, if it can. :meth:`complete`
        follows the last write.
        """
        ...

    def complete(self) -> None:
        """All elements have been written through :meth:`in_host_memory`."""
        ...

    def nbytes(self) -> dict[str, int]:
        """Bytes by tier: ``device``, ``ram`` and ``disk``."""
        ...

    def close(self) -> None:
        """Give memory and files back."""
        ...


class _InMemory:
    """What the rows in memory share."""

    def __init__(self, memory: torch.Tensor):
        self.dtype = memory.dtype
        self._memory = memory

    def fetch_into(self, start: int, out: torch.Tensor) -> None:
        own = self._memory[start : start + out.numel()]
        if own.data_ptr() != out.data_ptr():
            out.copy_(own, non_blocking=True)

    def ahead(self, start: int, stop: int) -> None:
        """It is here."""

    def open(self, start: int, stop: int) -> torch.Tensor:
        return self._memory[start:stop]

    def store(self, start: int, values: torch.Tensor) -> None:
        own = self._memory[start : start + values.numel()]
        if own.data_ptr() != values.data_ptr() or own.dtype != values.dtype:
            # to a GPU only: nobody waits for what comes from one
            own.copy_(values, non_blocking=not kinds.is_host(own.device))

    def in_host_memory(self, start: int, stop: int) -> torch.Tensor | None:
        return self._memory[start:stop] if self._memory.device.type == "cpu" else None

    def complete(self) -> None:
        """It was written where it is."""

    def close(self) -> None:
        self._memory = self._memory.new_empty(0)


class DeviceStorage(_InMemory):
    """Shards in memory of the compute device: ``fetch`` is a view and costs nothing."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        super().__init__(torch.zeros(numel, dtype=dtype, device=device))

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        return self._memory[start:stop]

    def nbytes(self) -> dict[str, int]:
        return {"device": self._memory.untyped_storage().nbytes(), "ram": 0, "disk": 0}


class HostStorage(_InMemory):
    """Shards in host memory: every fetch is a copy to the compute device, also where that is the
    host itself.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        take: Callable[[int, torch.dtype], torch.Tensor],
    ):
        super().__init__(take(numel, dtype))
        self._device = device

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        return self._memory[start:stop].to(self._device, copy=True)

    def nbytes(self) -> dict[str, int]:
        return {"device": 0, "ram": self._memory.nbytes, "disk": 0}
