"""The job of a save, in the call or in a thread beside the training (``background_saves.py``): each
rank writes its file, the ranks exchange outcomes, by collectives or messages, rank 0 commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from hf_zero.checkpoint import find
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.failures import describe_error, describe_failures
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.retention import retain
from hf_zero.checkpoint.storage import AnyPath
from hf_zero.checkpoint.tensorfile import BlockHashes, FileHashes
from hf_zero.errors import CheckpointError, RankMismatchError
from hf_zero.logging import JsonObject, logger

if TYPE_CHECKING:
    from hf_zero.distributed.store import StoreMessages
    from hf_zero.distributed.world_group import RankGroup


@dataclass(frozen=True)
class SharedFiles:
    """The files other than rank files, as bytes: ``files`` in the checkpoint folder, ``above`` in
    its parent.

    The manifest still lacks the hashes of the rank files.
    """

    manifest: Manifest
    files: dict[str, bytes]
    above: dict[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint: the files of ranks and the shared ones."""
        ranks = sum(entry.size for entry in self.manifest.files)
        return ranks + sum(map(len, self.files.values()))


NOTHING_SAVED = "Nothing was saved as {!r}; earlier checkpoints are as they were."
COMPLETE = "{} itself is complete; pass its tag to load it."


@dataclass(frozen=True)
class Outcome:
    """Result of writing the file of one rank: its hashes, or an error message."""

    hashes: FileHashes | None
    error: str = ""


class Exchange(Protocol):
    """Protocol by which the ranks of one save exchange their outcomes."""

    def gather(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcomes of all ranks, by rank, on rank 0; the result on others is unused."""

    def broadcast(self, failure: str) -> str:
        """Return rank 0's ``failure`` on all ranks."""


@dataclass(frozen=True)
class SaveJob:
    """A planned save: its target, this rank's file and, on rank 0, all shared files."""

    target: CommitTarget
    path: AnyPath
    rank: int
    world: int
    shared: SharedFiles | None
    keep: int | None = None

    def run(
        self,
        write: Callable[[], FileHashes],
        exchange: Exchange,
        on_finished: Callable[[], object] = lambda: None,
    ) -> tuple[str, Exception | None]:
        """Write this rank's file with ``write``, which returns its hashes, and commit on rank 0,
        which calls ``on_finished`` last.

        Returns the failure, equal on all ranks and "" on success, and the exception of this rank,
        if any. Raises RankMismatchError, which says whether the checkpoint is complete, if a rank
        has ended before it has the failure.
        """
        causes: list[Exception] = []
        failure = ""
        try:
            try:
                outcome = Outcome(write())
            except Exception as error:
                causes.append(error)
                outcome = Outcome(None, describe_error(error, self.path))
            outcomes = exchange.gather(outcome)
            if self.shared is not None:
                failure = self._publish(outcomes, causes)
        except BaseException:
            if self.shared is not None:
                self.target.abort()
            raise
        if self.shared is not None and failure:
            self.target.abort()
        elif self.shared is not None:
            failure = self._finish(on_finished, causes)
        try:
            return exchange.broadcast(failure), causes[0] if causes else None
        except RankMismatchError as error:
            final = self.target.final
            unknown = f"hf-zero verify says whether {final} is complete."
            state = COMPLETE.format(final) if self.is_published() else unknown
            error.args = (f"{error}. {failure or state}",)
            raise

    def is_published(self) -> bool:
        """Return whether the folder holds this save's checkpoint."""
        try:
            manifest = read_manifest(self.target.final / MANIFEST_NAME)
        except (CheckpointError, OSError):
            return False
        return manifest.save_id == self.target.save_id

    def _publish(self, outcomes: list[Outcome], causes: list[Exception]) -> str:
        """Write the shared files, with the hashes in the manifest, if all ranks have written their
        files. Returns "" once the checkpoint exists, else the failure; nothing has changed then.
        """
        assert self.shared is not None
        failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
        if not failed:
            entries = self.shared.manifest.files
            files = tuple(
                replace(entry, hash=outcome.hashes.file, blocks=outcome.hashes.blocks)
                for entry, outcome in zip(entries, outcomes, strict=True)
                if outcome.hashes is not None
            )
            try:
                order = find.next_order(self.target.directory)
                manifest = replace(self.shared.manifest, files=files, order=order)
                self.target.publish(manifest, self.shared.files, self.shared.above)
                return ""
            except Exception as error:
                causes.append(error)
                failed = {0: describe_error(error, self.path.parent)}
        return f"{describe_failures(failed, self.world)}. {NOTHING_SAVED.format(self.target.tag)}"

    def _finish(self, on_finished: Callable[[], object], causes: list[Exception]) -> str:
        """Point ``latest`` to the new checkpoint, then remove the one that it replaces and those
        beyond ``keep``, and call ``on_finished``. Returns the failure, or "".
        """
        assert self.shared is not None
        try:
            self.target.finish(self.shared.above)
            if self.keep is not None:
                retain(self.target.final, self.keep, self.target.others)
            on_finished()
        except Exception as error:
            causes.append(error)
            text = describe_failures({0: describe_error(error, self.target.final)}, self.world)
            return f"{text}. {COMPLETE.format(self.target.final)}"
        return ""


class ByCollectives:
    """Exchange of outcomes by collectives."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def gather(self, outcome: Outcome) -> list[Outcome]:
        outcomes: list[Outcome] = self._ranks.all_gather_object(outcome)
        return outcomes

    def broadcast(self, failure: str) -> str:
        return str(self._ranks.broadcast_object(failure))


class ByMessages:
    """Exchange of the outcomes of save ``number`` through the store, without a collective. Without
    ``mail`` there is one rank.
    """

    def __init__(self, mail: StoreMessages | None, number: int, job: SaveJob) -> None:
        self._mail, self._number, self._job = mail, number, job
        self._lost: Exception | None = None  # the error that cut this rank off the store or rank 0

    def gather(self, outcome: Outcome) -> list[Outcome]:
        if self._mail is None:
            return [outcome]
        if self._job.rank > 0:
            try:
                self._mail.send("wrote", self._number, json.dumps(asdict(outcome)))
            except RuntimeError as error:
                self._lost = error
            return []
        others = range(1, self._job.world)
        if not others:
            return [outcome]
        try:
            messages = self._mail.receive_all("wrote", self._number, others)
            self._mail.forget("wrote", self._number)
            self._mail.forget("verdict", self._number - 1)  # every rank has read it
        except RuntimeError as error:
            return [outcome, *(Outcome(None, describe_error(error)) for _ in others)]
        return [outcome, *(_outcome_of(messages[rank]) for rank in others)]

    def broadcast(self, failure: str) -> str:
        if self._mail is None:
            return failure
        if self._job.rank > 0:
            if self._lost is None:
                try:
                    return str(json.loads(self._mail.receive("verdict", self._number, 0)))
                except RuntimeError as error:
                    self._lost = error
            return self._read_outcome(self._lost)
        try:
            self._mail.send("verdict", self._number, json.dumps(failure))
        except RuntimeError as error:  # the other ranks read the result from the folder
            logger.warning(
                "%s: could not notify the other ranks: the store is unreachable (%s)",
                self._job.target.final,
                error,
            )
        return failure

    def _read_outcome(self, error: Exception) -> str:
        """Return "" if the folder holds this save's checkpoint, else what to do."""
        if self._job.is_published():
            return ""
        return (
            f"rank {self._job.rank} does not know what became of {self._job.target.final} "
            f"({error}); hf-zero verify says whether it is complete"
        )


def _outcome_of(message: str | RankMismatchError) -> Outcome:
    """Return the outcome that a rank has sent, or the failure in place of one that did not come."""
    if isinstance(message, RankMismatchError):
        return Outcome(None, str(message))
    sent: JsonObject = json.loads(message)
    hashes = sent["hashes"]
    if hashes is not None:
        hashes = FileHashes(hashes["file"], BlockHashes(**hashes["blocks"]))
    return Outcome(hashes, sent["error"])
