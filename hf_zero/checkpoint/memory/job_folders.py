"""The folders of one engine's generations on this host, and the hosts of the job's ranks: what can
be known before there is an engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.memory import folders
from hf_zero.checkpoint.memory.hosts import Hosts, machine
from hf_zero.checkpoint.memory.inventory import Generation, Held, generations, scan
from hf_zero.checkpoint.storage import collective_try
from hf_zero.config.sections import MemorySection
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed


class JobFolders:
    """The folders of an engine of this job on ``host``. The constructor is collective over
    ``ranks``, all of the job's.

    bases: folders that may hold the job's, the preferred one first. number: that of the engine
    among those of this process that save into memory. token: agreed by the ranks, and unique.
    begun: when they agreed, in milliseconds since the epoch.

    Raises CheckpointError if several machines have one name.
    """

    def __init__(self, settings: MemorySection, ranks: Any, rank: int, host: str) -> None:
        self.rank, self._ranks, self.number = rank, ranks, 0
        job, lasting = folders.job_identity(settings.job)
        self.bases: Sequence[Path] = folders.bases(settings.folder)
        begun = time.time_ns() // 1_000_000
        local = (host, job, lasting, secrets.token_hex(16), begun, machine(self.bases[0]))
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
        _, self.job, self.is_lasting, self.token, self.begun, _ = gathered[0]

    def job_folder(self, base: Path) -> Path:
        return folders.job_folder(base, self.job)

    def folder(self, base: Path) -> Path:
        """Return the folder of this engine on this host, below ``base``."""
        host = folders.plain(self.hosts.names[self.rank])
        return self.job_folder(base) / host / f"engine-{self.number}"

    @property
    def place(self) -> tuple[str, int, int]:
        """Key of this engine among those that save into memory: one of them has these folders."""
        return str(self.job_folder(self.bases[0])), self.rank, self.number

    @property
    def acts_for_host(self) -> bool:
        """Whether this rank is the first of its host."""
        return self.hosts.first(self.rank) == self.rank

    def scan(self) -> dict[Held, Path]:
        """Return the rank files that this host holds, with their paths. Raises CheckpointError for
        a folder of another user.
        """
        for base in self.bases:
            folders.refuse_foreign(self.job_folder(base))
        return scan([self.folder(base) for base in self.bases])

    def exchange_inventories(self) -> tuple[list[Generation], dict[Held, Path]]:
        """Return the generations over all hosts, newest first, and this host's files.
        Collective.
        """
        local, inventories = collective_try(
            self._ranks, self.scan, share=lambda files: list(files) if self.acts_for_host else []
        )
        return generations(self.hosts.names, inventories), local
