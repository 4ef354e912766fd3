"""Free bytes for one rank in each tier that may hold training state: the device, the host's memory,
the folders of files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_zero.config.variables import local_world_size
from hf_zero.device import kinds
from hf_zero.device.host_limits import free_ram, memlock


@dataclass(frozen=True)
class DiskFree:
    """Bytes that this rank may write below one folder; folders with equal ``disk`` share them."""

    path: str
    nbytes: int
    disk: int


@dataclass(frozen=True)
class FreeBytes:
    """Bytes that one rank may still take in each tier.

    ``host_device``: the device computes in the host's memory, so that both are one tier, ``ram``.
    ``memlock`` is ``ulimit -l``, None if unlimited, without regard to which NVIDIA's driver pins.
    ``limited_by`` names the limit that determines ``ram``. ``held``: bytes of ``device`` and
    ``ram`` that the caller holds now and will free. Quotas of disks are not known.
    """

    device: int
    ram: int
    disks: tuple[DiskFree, ...] = ()
    host_device: bool = False
    memlock: int | None = None
    limited_by: str = ""
    held: tuple[int, int] = (0, 0)

    def numbers(self) -> list[int]:
        """Return the numbers for a minimum over ranks: equally many on every rank that names the
        same folders.
        """
        return [
            self.device,
            self.ram,
            *(number for disk in self.disks for number in (disk.nbytes, disk.disk)),
        ]

    def with_numbers(self, numbers: Sequence[int]) -> FreeBytes:
        """Return a copy with the ``numbers`` that the ranks have agreed on."""
        pairs = zip(self.disks, numbers[2::2], numbers[3::2], strict=True)
        return replace(
            self,
            device=int(numbers[0]),
            ram=int(numbers[1]),
            disks=tuple(
                DiskFree(free.path, int(nbytes), int(disk)) for free, nbytes, disk in pairs
            ),
        )

    def plus(self, device: int = 0, ram: int = 0) -> FreeBytes:
        """Return a copy with ``device`` and ``ram`` bytes more, or fewer if negative."""
        return replace(
            self,
            device=self.device + device,
            ram=self.ram + ram + (device if self.host_device else 0),
        )

    def without_held(self) -> FreeBytes:
        """Return a copy without the bytes that the caller holds now."""
        device, ram = self.held
        return replace(self.plus(-device, -ram), held=(0, 0))


def free_bytes(device: torch.device) -> int:
    """Return the bytes free on ``device`` for this rank: on a GPU including torch's unused cache,
    on the CPU this rank's share of the machine's memory.
    """
    if kinds.is_synchronous(device):
        return free_ram(ranks=local_world_size(1)).nbytes
    return free_on_device(device)


def measure(
    device: torch.device, folders: Sequence[str] = (), ranks: int | None = None
) -> FreeBytes:
    """Return the bytes free for this rank now on its ``device``, on this host and below
    ``folders``, which need not exist yet.

    ``ranks``: ranks of this host that share them; None: the launcher's number.
    """
    ranks = ranks or local_world_size(1)
    ram = free_ram(ranks=ranks)
    on_host = kinds.is_synchronous(device)
    return FreeBytes(
        device=ram.nbytes if on_host else free_bytes(device),
        ram=ram.nbytes,
        disks=_disks(list(dict.fromkeys(folders)), ranks),
        host_device=on_host,
        memlock=memlock(),
        limited_by=ram.why + (f", shared by {ranks} ranks" if ram.shared and ranks > 1 else ""),
    )


def _disks(folders: Sequence[str], ranks: int) -> tuple[DiskFree, ...]:
    disks: list[DiskFree] = []
    numbers: dict[int, int] = {}
    for index, folder in enumerate(folders):
        existing = nearest(folder)
        number = numbers.setdefault(os.stat(existing).st_dev, index)
        disks.append(DiskFree(folder, shutil.disk_usage(existing).free // ranks, number))
    return tuple(disks)


def nearest(folder: str) -> Path:
    """Return ``folder``, or its nearest parent that exists."""
    path = Path(folder).absolute()
    return next(parent for parent in (path, *path.parents) if os.path.exists(parent))


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors of this process."""
    return int(kinds.module_of(device).memory_allocated(device))


def max_allocated(device: torch.device) -> int:
    """Return the peak of :func:`allocated` since the process began, or since its last reset."""
    return int(kinds.module_of(device).max_memory_allocated(device))


def _had(device: torch.device) -> int:
    module = kinds.module_of(device)
    return int(module.mem_get_info(device)[0]) + int(module.memory_reserved(device))


def free_on_device(device: torch.device) -> int:
    """Return the bytes that this process may still take, including torch's unused cache."""
    return _had(device) - allocated(device)


def free_at_the_peak(device: torch.device) -> int:
    """Return the bytes of :func:`free_on_device` at the peak of use."""
    return _had(device) - max_allocated(device)
