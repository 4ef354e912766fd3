"""Needs against what is free: pure arithmetic, so that ranks which have agreed on the free bytes
come to one verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_zero.device.free_memory import Free
from hf_zero.logging import in_units
from hf_zero.planning.needs import NamedBytes, Needs

# of the free memory of a host: page tables, loaders and the allocator take from it too
RAM_SHARE = 0.96
# of the device, left to what a model computes with; how much that is depends on the batch
ACTIVATIONS = 0.2
# of the device, left alone where activations are counted: fragments, buffers of communicators
BESIDE_ACTIVATIONS = 0.1


@dataclass(frozen=True)
class Row:
    """One tier: what is needed there, made of ``parts``, and what is free.

    ``limited_by`` says who sets the limit.
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
    """A row for each tier that something is needed of.

    ``notes`` are worth a word, and refuse nothing.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.rows)

    @property
    def short(self) -> tuple[Row, ...]:
        """The tiers that do not suffice."""
        return tuple(row for row in self.rows if not row.fits)


def judge(needs: Needs, free: Free, margin: float = 0.0) -> MemoryVerdict:
    """Whether ``needs`` fit into ``free``, both of one rank; ``margin`` is the share of the device
    that is left alone.

    Where the device computes in the host's memory the two are one tier. A folder whose free bytes
    are not known is not judged.
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
