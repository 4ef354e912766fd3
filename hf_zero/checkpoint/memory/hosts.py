"""The hosts of a job's ranks, and which ranks keep copies of each other's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def machine(base: Path) -> str:
    """Return what tells the file system of ``base`` from those of other machines and containers,
    which may have the same name.
    """
    existing = next(path for path in (base, *base.parents) if path.exists())
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot} {existing.stat().st_dev}"


class Hosts:
    """Hosts in the order of their lowest ranks. ``names``: the host of each rank."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(self.names):
            self.ranks.setdefault(name, []).append(rank)

    def first(self, rank: int) -> int:
        """Return the lowest rank on the host of ``rank``, which acts for the host."""
        return self.ranks[self.names[rank]][0]

    def partners(self, rank: int, copies: int) -> list[int]:
        """Return the ranks that keep copies of the file of ``rank`` where ``copies`` hosts are to
        hold it: one on each of the next hosts, as far as there are any.
        """
        order = list(self.ranks)
        index = order.index(self.names[rank])
        number = self.ranks[self.names[rank]].index(rank)
        following = [order[(index + n) % len(order)] for n in range(1, min(copies, len(order)))]
        return [self.ranks[name][number % len(self.ranks[name])] for name in following]

    def kept_by(self, rank: int, copies: int) -> list[int]:
        """Return the ranks of whose files ``rank`` keeps copies."""
        return [other for other in range(len(self.names)) if rank in self.partners(other, copies)]

    def files_on(self, rank: int, copies: int) -> list[int]:
        """Return the ranks whose files the host of ``rank`` holds, its own and copies."""
        local = set(self.ranks[self.names[rank]])
        every = range(len(self.names))
        return [r for r in every if local & {r, *self.partners(r, copies)}]
