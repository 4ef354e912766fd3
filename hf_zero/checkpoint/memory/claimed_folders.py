"""The folders of one engine's generations while it lives: marked as in use by its processes,
claimed for its host, below a base folder with room for two generations, and removed at a good end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.memory import folders
from hf_zero.checkpoint.memory.job_folders import JobFolders
from hf_zero.config.memory import MemorySection
from hf_zero.errors import CheckpointError
from hf_zero.logging import in_units
from hf_zero.ops import native

if TYPE_CHECKING:
    from hf_zero.distributed.world_group import RankGroup

KEY = "checkpoint.memory"


class ClaimedFolders(JobFolders):
    """Folders that the processes of one engine mark, claim and fill. base: the base folder on this
    host that has room. owns_generations: they are this attempt's to remove, which has loaded or
    saved one. The constructor is collective.
    """

    owns_generations = False

    def __init__(
        self,
        settings: MemorySection,
        ranks: RankGroup,
        rank: int,
        host: str,
        others: Iterable[JobFolders],
        number: int | None = None,
    ) -> None:
        super().__init__(settings, ranks, rank, host, others, number)
        self.copies, self._limit = settings.copies, settings.limit
        self.base = self.bases[0]
        self._marks: dict[Path, folders.InUse] = {}

    def mark(self) -> None:
        """Mark the existing folders of the job as in use by this process, claim the folders of the
        engine for its host, and keep them until this process ends well. Collective.

        Raises CheckpointError for folders of another user, or of another living job.
        """
        collective_try(self._ranks, self._claim)

        def enter() -> None:
            for base in self.bases:
                folders.enter(self.folder(base), self.rank)

        collective_try(self._ranks, enter)

    def _claim(self) -> None:
        for base in self.bases:
            if self.job_folder(base).is_dir():
                self.mark_job(base)
            if self.acts_for_host and self.folder(base).is_dir():
                self._claim_own(base)

    def _claim_own(self, base: Path) -> None:
        """Make this engine's folder below ``base`` if it is missing, and claim it for its host."""
        own = self.folder(base)
        if not self._holds(own):
            self._marks[own] = folders.Claim(own)
            folders.forget_ranks(own)

    def mark_job(self, base: Path) -> None:
        """Make the job's folder below ``base``, and mark it as in use by this process."""
        folder = self.job_folder(base)
        if not self._holds(folder):
            self._marks[folder] = folders.InUse(folder)

    def _holds(self, folder: Path) -> bool:
        return folder in self._marks and self._marks[folder].is_current()

    def make_folder(self) -> None:
        """Make this engine's folder below :attr:`base`, marked and claimed."""
        self.mark_job(self.base)
        if self.acts_for_host:  # an earlier job that ends removes a folder without a claim
            self._claim_own(self.base)
        else:
            self.folder(self.base).mkdir(parents=True, exist_ok=True, mode=0o700)

    def own(self) -> None:
        """Have the generations removed at a good end. Until then they are an earlier attempt's."""
        if self.owns_generations:
            return
        self.owns_generations = True
        for base in self.bases:
            folder = self.folder(base)
            mark = folders.rank_mark(folder, self.rank)
            native.release_at_exit(folder, self.job_folder(base), folders.IN_USE, mark)

    def keep_after_exit(self) -> None:
        """Have the generations stay whatever the exit code of this process is, until the next
        attempt ends.
        """
        for base in self.bases:
            own = folders.rank_mark(self.folder(base), self.rank)
            with suppress(FileNotFoundError):  # nothing is in this folder
                own.with_name(f"{own.name}-keeps").touch()

    def give_up_marks(self) -> None:
        """Give up the marks and claims of this process."""
        for mark in self._marks.values():
            mark.close()
        self._marks.clear()

    def release_folders(self) -> None:
        """Remove the generations once the last rank of this host has released them."""
        for base in self.bases:
            folders.release(self.folder(base), self.job_folder(base), self.rank)

    def choose_base(self, sizes: Sequence[int]) -> int:
        """Choose this host's base folder for two generations of files with ``sizes``, bytes by
        rank; return the bytes that they take on this host. Collective.

        Raises CheckpointError on all ranks if a host has no room.
        """
        here = [sizes[rank] for rank in self.hosts.files_on(self.rank, self.copies)]
        needed = len(folders.SLOTS) * sum(here)
        _, chosen = collective_try(
            self._ranks,
            lambda: str(self._first_fitting(needed)) if self.acts_for_host else "",
            share=lambda base: base,
        )
        self.base = Path(chosen[self.hosts.first(self.rank)])
        return needed

    def _first_fitting(self, needed: int) -> Path:
        """Return the first base folder on this host with room for ``needed`` bytes."""
        where = self.hosts.names[self.rank]
        several = self.copies > 1 and len(self.hosts.ranks) > 1
        less = (f"lower {KEY}.copies ({self.copies}), " if several else "") + f"or take {KEY} out"
        if self._limit is not None and needed > self._limit:
            raise CheckpointError(
                f"{KEY}: two generations of what host {where} keeps take {in_units(needed)}, and "
                f"{KEY}.limit is {in_units(self._limit)}; raise the limit, {less}"
            )
        short = []
        for base in self.bases:
            free = folders.capacity(base, self.folder(base))
            if needed <= free:
                return base
            short.append(f"{base} has room for {in_units(free)}")
        raise CheckpointError(
            f"{KEY}: two generations of what host {where} keeps take {in_units(needed)}; "
            f"{'; '.join(short)}; name a folder with more room ({KEY}.folder), {less}"
        )
