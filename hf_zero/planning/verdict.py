"""Comparison of needs with free memory: pure arithmetic, so that ranks that have agreed on the free
bytes reach the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.device.free_memory import Free
from hf_zero.logging import in_units
from hf_zero.planning.needs import NamedBytes, Needs

# usable share of a host's free memory: page tables, loaders and the allocator need some too
RAM_SHARE = 0.96
# share of the device left for activations, whose size depends on the batch
ACTIVATIONS = 0.2
# share of the device left if activations are counted: for fragmentation, communicators' buffers
BESIDE_ACTIVATIONS = 0.1


@dataclass(frozen=True)
class Row:
    """One tier: the bytes needed, made up of ``parts``, and the free bytes.

    ``limited_by`` names the source of the limit.
    """

    tier: str
    needed: int
    free: int
    parts: tuple[NamedBytes, ...]
    limited_by: str = ""

    @property
    def fits(self) -> bool:
        return self.needed <= self.free


@dataclass(frozen=True)
class MemoryVerdict:
    """One row for each tier of which something is needed.

    ``notes`` are remarks that refuse nothing.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.rows)

    @property
    def short(self) -> tuple[Row, ...]:
        """The tiers that are too small."""
        return tuple(row for row in self.rows if not row.fits)


def judge(needs: Needs, free: Free, margin: float = 0.0) -> MemoryVerdict:
    """Return whether ``needs`` fit into ``free``, both of one rank, row by row. ``margin`` is the
    share of the device that is left free.

    If the device computes in host memory, both are one tier. A folder with unknown free bytes is
    not judged.
    """
    return MemoryVerdict(tuple(_rows(needs, free, margin)), tuple(_notes(needs, free)))


def _rows(needs: Needs, free: Free, margin: float) -> Iterator[Row]:
    ram = int(free.ram * RAM_SHARE)
    kept = f"{1 - RAM_SHARE:.0%} left to the rest of the process"
    why = f"{free.limited_by}; {kept}" if free.limited_by else kept
    if free.host_device:
        own = tuple(NamedBytes(f"{part.what} (device)", part.nbytes) for part in needs.device)
        yield Row("memory", needs.device_bytes + needs.ram_bytes, ram, (*own, *needs.ram), why)
    else:
        left = f"{margin:.0%} left to activations" if margin else ""
        yield Row("device", needs.device_bytes, int(free.device * (1 - margin)), needs.device, left)
        if needs.ram:
            yield Row("RAM", needs.ram_bytes, ram, needs.ram, why)
    written = dict(needs.files)
    for number in dict.fromkeys(disk.disk for disk in free.disks):
        shared = [disk for disk in free.disks if disk.disk == number]
        needed = sum(written.get(disk.path, 0) for disk in shared)
        if needed:
            yield Row(
                f"disk of {', '.join(disk.path for disk in shared)}",
                needed,
                min(disk.nbytes for disk in shared),
                needs.disk,
            )


def _notes(needs: Needs, free: Free) -> Iterator[str]:
    if free.memlock is not None and needs.pinned > free.memlock:
        yield (
            f"ulimit -l is {in_units(free.memlock)}, below the {in_units(needs.pinned)} to be "
            "pinned: NVIDIA's driver is not bound by it; where "
            "pinning is refused all the same, transfers go through memory that is not "
            "pinned, and are slower"
        )
