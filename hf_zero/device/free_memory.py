"""Free bytes for one rank in each place where training state may live: the device, the host's
memory, the folders of files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_zero.device import kinds, usage
from hf_zero.device.host_limits import free_ram, memlock


@dataclass(frozen=True)
class DiskFree:
    """What this rank may write below one folder; folders with the same ``disk`` number share it."""

    path: str
    nbytes: int
    disk: int


@dataclass(frozen=True)
class Free:
    """Bytes that one rank may still take in each tier.

    ``host_device``: the device computes in the host's memory, so that both are one tier, ``ram``.
    ``pinned`` is as much as ``ram``: NVIDIA's driver pins without regard to ``ulimit -l``, which is
    ``memlock``, None where it limits nothing. ``limited_by`` says what ``ram`` is the least of.
    Disk quotas are not known.
    """

    device: int
    ram: int
    disks: tuple[DiskFree, ...] = ()
    host_device: bool = False
    memlock: int | None = None
    limited_by: str = ""

    @property
    def pinned(self) -> int:
        return self.ram

    def numbers(self) -> list[int]:
        """What ranks agree on by taking the least of each: as many numbers on every rank that
        names the same folders.
        """
        return [
            self.device,
            self.ram,
            *(each for disk in self.disks for each in (disk.nbytes, disk.disk)),
        ]

    def with_numbers(self, numbers: Sequence[int]) -> Free:
        """This with the ``numbers`` that the ranks have agreed on."""
        pairs = zip(self.disks, numbers[2::2], numbers[3::2], strict=True)
        return replace(
            self,
            device=int(numbers[0]),
            ram=int(numbers[1]),
            disks=tuple(
                DiskFree(each.path, int(nbytes), int(disk)) for each, nbytes, disk in pairs
            ),
        )

    def with_room(self, device: int = 0, ram: int = 0) -> Free:
        """This with bytes more that the caller holds now and gives back."""
        return replace(
            self,
            device=self.device + device,
            ram=self.ram + ram + (device if self.host_device else 0),
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on ``device`` for this rank: on a GPU with what torch holds unused, on
    the CPU its share of the machine's.
    """
    return free_ram(ranks=_ranks_here()).nbytes if kinds.is_host(device) else usage.free(device)


def measure(device: torch.device, folders: Sequence[str] = (), ranks: int | None = None) -> Free:
    """What is free for this rank now, on its ``device``, on this host and below ``folders``, which
    need not be there yet.

    ``ranks`` of this host share it; None: as many as the launcher says.
    """
    ranks = ranks or _ranks_here()
    ram = free_ram(ranks=ranks)
    on_host = kinds.is_host(device)
    return Free(
        device=ram.nbytes if on_host else free_bytes(device),
        ram=ram.nbytes,
        disks=_disks(list(dict.fromkeys(folders)), ranks),
        host_device=on_host,
        memlock=memlock(),
        limited_by=ram.why + (f", over {ranks} ranks" if ram.shared and ranks > 1 else ""),
    )


def _disks(folders: Sequence[str], ranks: int) -> tuple[DiskFree, ...]:
    found: list[DiskFree] = []
    numbers: dict[int, int] = {}
    for index, folder in enumerate(folders):
        there = _nearest(folder)
        number = numbers.setdefault(os.stat(there).st_dev, index)
        found.append(DiskFree(folder, shutil.disk_usage(there).free // ranks, number))
    return tuple(found)


def _nearest(folder: str) -> Path:
    """``folder``, or the one above it that is there."""
    path = Path(folder).absolute()
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _ranks_here() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
