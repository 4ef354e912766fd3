"""Inventories of the hosts: the records in the folders of a job, exchanged, and the generations
that are complete over all hosts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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

RANK_RECORD = re.compile(r"rank-\d{5,}-of-\d{5,}" + re.escape(SUFFIX))


@dataclass(frozen=True)
class HeldFile:
    """A rank file of a generation that a host holds, with its record. attempt: a number that grows
    with each start of the job and with each load. digest: the hash of the record, which contains
    the hash of the file.
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
        """Return whether the file of each rank is on at least one host: every rank has committed
        its own.
        """
        return all(self.holders.get(rank) for rank in range(self.world))

    def least_holders(self) -> int:
        """Return the number of hosts that hold the file of a rank, the least of all ranks."""
        return min(len(set(self.holders.get(rank, ()))) for rank in range(self.world))


def is_later(saved: HeldFile | Generation, step: int, attempt: int) -> bool:
    """Return whether ``saved`` was saved after a checkpoint on disk of ``step`` and ``attempt``: it
    belongs to a later attempt, or to a later step of the same one. One of the same step precedes
    the save on disk.
    """
    if not attempt:  # of a run without checkpoints in memory
        return saved.step > step
    return (saved.attempt, saved.step) > (attempt, step)


def scan(folders: Sequence[Path]) -> dict[HeldFile, Path]:
    """Return the rank files with a fitting record in the slots of a job's ``folders`` on this host.
    A record that does not fit is logged and left out.
    """
    files: dict[HeldFile, Path] = {}
    slots = (folder / slot for folder in folders for slot in SLOTS)
    for path in (path for slot in slots for path in records_in(slot)):
        try:
            content = path.read_bytes()
            record = RankRecord.parse(content, path)
            entry = record.report.file
            file = path.with_name(entry.name)
            size = file.stat().st_size
            if record_path(file) != path:
                raise CheckpointError(f"{path} is the record of {entry.name}; remove it")
            if size != entry.size:
                raise CheckpointError(f"{file} has {size} bytes, and {path} says {entry.size}")
        except (CheckpointError, OSError) as error:
            logger.warning("skipped in memory: %s", describe_error(error, path))
            continue
        held = (record.save_id, record.attempt, record.step, record.world, record.rank)
        files[HeldFile(*held, hash_of(content))] = file
    return files


def records_in(slot: Path) -> list[Path]:
    """Return the records in one slot, by rank."""
    return sorted(path for path in slot.glob(f"*{SUFFIX}") if RANK_RECORD.fullmatch(path.name))


def holds_records(folder: AnyPath) -> bool:
    """Return whether ``folder`` is a slot with files of a generation, or a copy of one under
    another name; a script may name its own files like records.
    """
    records = [] if is_remote(folder) else records_in(folder)
    return any(folder.name in SLOTS or p.with_suffix(".safetensors").is_file() for p in records)


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


def time_of_newest_record(slot: Path) -> int:
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
    """Return the generations of all hosts, by attempt and then by step, newest first: those of a
    later attempt come first also at an earlier step, since it may have resumed from an older
    checkpoint. ``inventories``: what each rank reports of its host; ``hosts``: the host of each
    rank. A file whose records differ between hosts is counted for none of them.
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


def generation_to_keep(complete: Sequence[Generation], current_id: str, copies: int) -> str:
    """Return the save_id of the generation that the next save must not overwrite: ``current_id``,
    from which training continues, or the newest of the ``complete`` ones, newest first, if that is
    empty.

    If fewer than ``copies`` hosts hold some rank's file of it, return the newest older one that has
    all copies, if there is one: the next save overwrites the other slot, and a host lost during
    that save would leave no generation. A ``current_id`` that is not complete is returned as it is;
    "" if there is nothing to keep.
    """
    start = next((each for each in complete if each.save_id == current_id), None)
    if start is None and (current_id or not complete):
        return current_id
    older = complete[complete.index(start or complete[0]) :]
    return next((each for each in older if each.least_holders() >= copies), older[0]).save_id
