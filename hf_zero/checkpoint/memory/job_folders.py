"""The folders of one engine's generations on this host, and the hosts of the job's ranks: what can
be known before there is an engine.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint import host_folders
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.memory import folders
from hf_zero.checkpoint.memory.inventory import Generation, HeldFile, generations, scan
from hf_zero.config.memory import MemorySection
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, log_rank0

if TYPE_CHECKING:
    from hf_zero.distributed.world_group import RankGroup


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


class JobFolders:
    """The folders of an engine of this job on ``host``. The constructor is collective over
    ``ranks``, all of the job's.

    others: engines of this process that save into memory. bases: folders that may hold the job's,
    the preferred one first. number: by default the lowest index that none of ``others`` has on any
    rank. token: agreed by the ranks, and unique. attempt: when the ranks agreed, in milliseconds
    since the epoch.

    Raises CheckpointError if several machines have one name.
    """

    job: str
    number: int

    def __init__(
        self,
        settings: MemorySection,
        ranks: RankGroup,
        rank: int,
        host: str,
        others: Iterable[JobFolders] = (),
        number: int | None = None,
    ) -> None:
        self.rank, self._ranks = rank, ranks
        job, lasting = host_folders.job_identity(settings.job)
        self.bases: Sequence[Path] = host_folders.bases(settings.folder)
        attempt = time.time_ns() // 1_000_000
        # an engine that was not destroyed may live longer on one rank than on another
        numbers = [
            (other.job, other.number)
            for other in others
            if other.rank == rank and other.bases[0] == self.bases[0]
        ]
        local = (
            host,
            job,
            lasting,
            secrets.token_hex(16),
            attempt,
            numbers,
            machine(self.bases[0]),
        )
        gathered = ranks.all_gather_object(local, "hosts of checkpoints in memory")
        tokens: dict[str, str] = {}
        twice = {name for name, *_, of in gathered if tokens.setdefault(name, of) != of}
        if twice:
            raise CheckpointError(
                f"checkpoint.memory: several machines or containers call themselves "
                f"{listed(sorted(twice))}; give each a name of its own in HF_ZERO_HOST, or let the "
                "ranks of one name share a folder (checkpoint.memory.folder)"
            )
        self.hosts = Hosts([name for name, *_ in gathered])
        _, self.job, self.is_lasting, self.token, self.attempt, *_ = gathered[0]
        taken = {number for *_, of, _ in gathered for job, number in of if job == self.job}
        free = next(number for number in count() if number not in taken)
        self.number = free if number is None else number

    def job_folder(self, base: Path) -> Path:
        return folders.job_folder(base, self.job)

    def folder(self, base: Path) -> Path:
        """Return the folder of this engine on this host, below ``base``."""
        host = host_folders.plain(self.hosts.names[self.rank])
        return self.job_folder(base) / host / f"engine-{self.number}"

    @property
    def place(self) -> tuple[str, int, int]:
        """Key of this engine among those that save into memory: one of them has these folders."""
        return str(self.job_folder(self.bases[0])), self.rank, self.number

    @property
    def acts_for_host(self) -> bool:
        """Return whether this rank is the first of its host."""
        return self.hosts.first(self.rank) == self.rank

    def scan(self) -> dict[HeldFile, Path]:
        """Return the rank files that this host holds, with their paths. Raises CheckpointError for
        a folder of another user.
        """
        for base in self.bases:
            host_folders.refuse_foreign(self.job_folder(base))
        return scan([self.folder(base) for base in self.bases])

    def exchange_inventories(
        self, run: str | None = None
    ) -> tuple[list[Generation], dict[HeldFile, Path]]:
        """Return the generations of all hosts, newest first, and this host's files. With rank 0's
        ``run``, leave out what its process has saved for runs in other folders. Collective.
        """
        local, shared = collective_try(
            self._ranks,
            self.scan,
            share=lambda files: (list(files) if self.acts_for_host else [], run, _known(files)),
        )
        inventories = [files for files, _, _ in shared]
        found, (_, asked, folders_of) = generations(self.hosts.names, inventories), shared[0]
        others = [g for g in found if asked and asked not in folders_of.get(g.save_id, (asked,))]
        if others:
            log_rank0(
                f"the memory of the hosts holds step {others[0].step} of the run in "
                f"{listed(folders_of[others[0].save_id])}, which is not taken for that in {asked}",
                logging.WARNING,
            )
        return [generation for generation in found if generation not in others], local


# by save_id, the folders of the run for which this process has saved into memory: a process may
# train several, one after the other, under one name of a job
_saved_here: dict[str, set[str]] = {}
REMEMBERED = 64


def remember(save_id: str, folders_of_run: set[str]) -> None:
    """Note that this process saves ``save_id`` for the run in ``folders_of_run``."""
    _saved_here[save_id] = folders_of_run
    if len(_saved_here) > REMEMBERED:
        del _saved_here[next(iter(_saved_here))]


def _known(files: Iterable[HeldFile]) -> dict[str, list[str]]:
    """Return, by save_id, the known folders of the runs of ``files``."""
    ids = {file.save_id for file in files}
    return {key: sorted(of) for key, of in _saved_here.items() if key in ids and of}
