"""Inventories of the hosts: the records in the folders of a job, exchanged, and the generations
that are complete over all hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hf_zero.checkpoint.failures import describe_error
from hf_zero.checkpoint.memory.folders import CLAIM, RESUME, SLOTS
from hf_zero.checkpoint.memory.record import SUFFIX, RankRecord, record_path
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.checkpoint.tensorfile import hash_of
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

RANK_RECORDS = f"rank-*-of-*{SUFFIX}"


@dataclass(frozen=True)
class HeldFile:
    """A rank file of a generation that a host holds, with its record. digest: the hash of the
    record, which contains the hash of the file.
    """

    save_id: str
    attempt: int
    step: int
    world: int
    rank: int
    digest: str


@dataclass
class Generation:
    """A save into memory. holders: by rank, the hosts with its file."""

    save_id: str
    attempt: int
    step: int
    world: int
    holders: dict[int, list[str]] = field(default_factory=dict)

    def is_complete(self) -> bool:
        """Return whether some host holds the file of each rank: every rank has committed it."""
        return all(self.holders.get(rank) for rank in range(self.world))

    def least_holders(self) -> int:
        """Return the number of hosts that hold the file of a rank, the least of all ranks."""
        return min(len(set(self.holders.get(rank, ()))) for rank in range(self.world))


def is_later(saved: HeldFile | Generation, step: int, attempt: int) -> bool:
    """Return whether ``saved`` was saved after a checkpoint on disk of ``step`` and ``attempt``: it
    belongs to a later attempt, or load within it, or has a later step of the same one. One of the
    same step precedes the save on disk.
    """
    if not attempt:  # of a run without checkpoints in memory
        return saved.step > step
    return (saved.attempt, saved.step) > (attempt, step)


def scan(folders: Sequence[Path]) -> dict[HeldFile, Path]:
    """Return the rank files with a fitting record in the slots of a job's ``folders`` on this host.
    A record that does not fit is logged and left out.
    """
    files: dict[HeldFile, Path] = {}
    for path in (item for folder in folders for item in _records(folder)):
        try:
            content = path.read_bytes()
            record = RankRecord.parse(content, path)
            entry = record.report.file
            file = path.with_name(entry.name)
            size = file.stat().st_size
            if record_path(file) != path or size != entry.size:
                raise CheckpointError(f"{file} has {size} bytes, its record says {entry.size}")
        except (CheckpointError, OSError) as error:
            logger.warning("skipped in memory: %s", describe_error(error, path))
            continue
        digest = hash_of(content)
        key = HeldFile(
            record.save_id, record.attempt, record.step, record.world, record.rank, digest
        )
        files[key] = file
    return files


def _records(folder: Path) -> Iterator[Path]:
    for slot in SLOTS:
        yield from records_in(folder / slot)


def records_in(slot: Path) -> list[Path]:
    """Return the records in one slot, by rank."""
    return sorted(slot.glob(RANK_RECORDS))


def holds_records(folder: AnyPath) -> bool:
    """Return whether ``folder`` is a slot with files of a generation."""
    return not is_remote(folder) and next(iter(folder.glob(RANK_RECORDS)), None) is not None


def is_from_memory(folder: AnyPath) -> bool:
    """Return whether ``folder`` belongs to the ``resume`` folder of generations in memory: what a
    load reads, with links to files that may be gone.
    """
    return not is_remote(folder) and any(
        p.name == RESUME and (p.parent / CLAIM).is_file() for p in (folder, *folder.parents)
    )


def is_slot(folder: AnyPath) -> bool:
    """Return whether ``folder`` is a slot, also one without records: a save overwrites it, or has
    not ended.
    """
    return not is_remote(folder) and folder.name in SLOTS and (folder.parent / CLAIM).is_file()


def newest_record(slot: Path) -> int:
    """Return the time of the last record in ``slot``, in nanoseconds; 0 if a save has removed all
    of them.
    """
    newest = 0
    for path in records_in(slot):
        with suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime_ns)
    return newest


def generations(
    hosts: Sequence[str], inventories: Sequence[Sequence[HeldFile]]
) -> list[Generation]:
    """Return the generations of all hosts, newest first: those of the last attempt, or load within
    it, which may have trained on from an earlier step than the others. ``inventories``: what each
    rank reports of its host; ``hosts``: the host of each rank. A file whose records differ between
    hosts is counted for none of them.
    """
    by_save: dict[str, Generation] = {}
    digests: dict[tuple[str, int], set[str]] = {}
    for host, files in zip(hosts, inventories, strict=True):
        for file in files:
            generation = Generation(file.save_id, file.attempt, file.step, file.world)
            generation = by_save.setdefault(file.save_id, generation)
            generation.holders.setdefault(file.rank, []).append(host)
            digests.setdefault((file.save_id, file.rank), set()).add(file.digest)
    for (save_id, rank), copies in digests.items():
        if len(copies) > 1:
            logger.warning("the copies of rank %d's file differ between hosts", rank)
            by_save[save_id].holders.pop(rank)
    return sorted(by_save.values(), key=lambda g: (g.attempt, g.step), reverse=True)


def generation_to_keep(complete: Sequence[Generation], newest_id: str, copies: int) -> str:
    """Return the save_id of the generation that the next save must not overwrite, of the
    ``complete`` ones, newest first: ``newest_id``, from which training continues, by default the
    newest. If a process died before all its ``copies`` counted, return the newest earlier one that
    has all: else the loss of a host would lose everything until the next save is complete.
    """
    start = next((each for each in complete if each.save_id == newest_id), None)
    if start is None and (newest_id or not complete):
        return newest_id
    start = start or complete[0]
    older = complete[complete.index(start) :]
    return next((each for each in older if each.least_holders() >= copies), start).save_id
