"""The second half of a save, inline or on a thread: write this rank's file, exchange outcomes with
the other ranks, commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hf_zero.checkpoint.collective_try import describe_error, describe_failures
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.plan import SharedFiles
from hf_zero.checkpoint.retention import retain
from hf_zero.checkpoint.storage import AnyPath

NOTHING_SAVED = "Nothing was saved as {!r}; earlier checkpoints are as they were."


@dataclass(frozen=True)
class Outcome:
    """What came of the file of one rank: its hash, or what was wrong."""

    hash: str
    error: str = ""


class Exchange(Protocol):
    """How the ranks of one save learn of each other's outcomes."""

    def gather(self, own: Outcome) -> list[Outcome]:
        """The outcomes of all ranks, in order, on rank 0. What other ranks get is not used."""

    def broadcast(self, failure: str) -> str:
        """Rank 0's ``failure``, on all ranks."""


@dataclass(frozen=True)
class SaveJob:
    """A save that is planned: where it goes, this rank's file, on rank 0 all the other files."""

    target: CommitTarget
    path: AnyPath
    rank: int
    world: int
    shared: SharedFiles | None
    keep: int | None = None

    def run(
        self,
        write: Callable[[], str],
        exchange: Exchange,
        committed: Callable[[], object] = lambda: None,
    ) -> tuple[str, Exception | None]:
        """Write this rank's file by ``write``, which returns its hash, and commit on rank 0, where
        ``committed`` is called last. Returns what was wrong, "" if nothing, the same on all ranks;
        and the exception of this rank.
        """
        causes: list[Exception] = []
        failure = ""
        try:
            try:
                own = Outcome(write())
            except Exception as error:
                causes.append(error)
                own = Outcome("", describe_error(error, self.path))
            outcomes = exchange.gather(own)
            if self.shared is not None:
                failure = self._publish(outcomes, causes)
        except BaseException:
            if self.shared is not None:
                self.target.abort()
            raise
        if self.shared is not None and failure:
            self.target.abort()
        elif self.shared is not None:
            failure = self._finish(committed, causes)
        return exchange.broadcast(failure), causes[0] if causes else None

    def _publish(self, outcomes: list[Outcome], causes: list[Exception]) -> str:
        """Write the shared files, with the hashes in the manifest, if all ranks have written: the
        checkpoint is there, or nothing has changed.
        """
        assert self.shared is not None
        failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
        if not failed:
            entries = self.shared.manifest.files
            files = tuple(
                replace(entry, hash=outcome.hash)
                for entry, outcome in zip(entries, outcomes, strict=True)
            )
            manifest = replace(self.shared.manifest, files=files)
            try:
                self.target.publish(manifest, self.shared.files, self.shared.above)
                return ""
            except Exception as error:
                causes.append(error)
                failed = {0: describe_error(error, self.path.parent)}
        return f"{describe_failures(failed, self.world)}. {NOTHING_SAVED.format(self.target.tag)}"

    def _finish(self, committed: Callable[[], object], causes: list[Exception]) -> str:
        """Have ``latest`` name the new checkpoint, then remove the one that it replaces and those
        that are too many.
        """
        assert self.shared is not None
        try:
            self.target.finish(self.shared.above)
            if self.keep is not None:
                retain(self.target.final, self.keep)
            committed()
        except Exception as error:
            causes.append(error)
            text = describe_failures({0: describe_error(error, self.target.final)}, self.world)
            return f"{text}. {self.target.final} itself is whole; pass its tag to load it."
        return ""
