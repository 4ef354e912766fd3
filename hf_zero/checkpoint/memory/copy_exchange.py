"""The exchange that makes a generation: this rank's file and its record go to the hosts that keep
copies of them, those of other hosts' ranks come here, and all ranks agree that theirs are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hf_zero.checkpoint import find
from hf_zero.checkpoint.memory.job_folders import Hosts
from hf_zero.checkpoint.memory.record import RankRecord, record_path, write_record
from hf_zero.checkpoint.memory.slot_files import SlotCopy, SlotFiles, Staged
from hf_zero.checkpoint.storage import BLOCK
from hf_zero.checkpoint.tensorfile import FileHasher, bytes_view
from hf_zero.distributed.host_transfers import HostTransfers
from hf_zero.errors import CheckpointError, HfZeroError


class CopyExchange:
    """The exchanges of one rank, on the thread of its saves; and the copies that it keeps."""

    def __init__(
        self, transfers: HostTransfers, hosts: Hosts, rank: int, world: int, copies: int
    ) -> None:
        self._transfers, self._world = transfers, world
        self._partners = hosts.partners(rank, copies)  # keep copies of this rank's file
        self._sources = hosts.kept_by(rank, copies)  # whose copies this rank keeps
        self._kept = SlotFiles(torch.device("cpu"))  # copies: no device reads or writes them

    def commit(
        self, staged: Staged | None, slot: Path, log_failure: Callable[[Exception], None]
    ) -> bool:
        """Hash this rank's file, exchange copies, write the records into ``slot`` of this host, and
        return whether all ranks have written theirs. Errors of this rank go to ``log_failure``: the
        others are told. Raises RuntimeError if a rank has ended.
        """
        content = b""
        try:
            content = b"" if staged is None else hashed(staged).dumps()
        except Exception as error:  # ranks that were out of step would pair parts of two saves
            log_failure(error)
            staged = None
        size, save = (0, 0) if staged is None else (staged.plan.size, int(staged.save_id[:15], 16))
        told = self._exchange_sizes(torch.tensor([size, len(content), save]))
        copies: list[SlotCopy] = []
        try:
            others = [rank for rank, sizes in told.items() if sizes[1] and sizes[2] != save]
            if others and staged is not None:
                raise CheckpointError(f"ranks {others} sent the copies of another save")
            copies = [
                self._place_in(slot, rank, *sizes[:2]) for rank, sizes in told.items() if sizes[1]
            ]
        except (HfZeroError, OSError) as error:
            log_failure(error)
            staged = None
        if not self._transfers.agree(staged is not None) or staged is None:
            return False
        of_record = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._transfers.transfer(
            [(peer, tensor) for peer in self._partners for tensor in (staged.image, of_record)],
            [(copy.rank, tensor) for copy in copies for tensor in (copy.image, copy.record)],
        )
        written = True
        try:
            write_record(record_path(staged.path), content)
            for copy in copies:
                write_record(record_path(copy.path), bytes(bytes_view(copy.record)))
        except OSError as error:
            log_failure(error)
            written = False
        return self._transfers.agree(written)

    def _exchange_sizes(self, own: torch.Tensor) -> dict[int, list[int]]:
        """Exchange the sizes of files and records, and the number of their save; return those of
        the ranks whose copies this one keeps. A rank that has failed has zeros.
        """
        told = {rank: torch.zeros_like(own) for rank in self._sources}
        sizes = own.view(torch.uint8)
        self._transfers.transfer(
            [(peer, sizes) for peer in self._partners],
            [(rank, tensor.view(torch.uint8)) for rank, tensor in told.items()],
        )
        return {rank: list(map(int, numbers)) for rank, numbers in told.items()}

    def _place_in(self, slot: Path, rank: int, size: int, of_record: int) -> SlotCopy:
        """Return the place in ``slot`` for a copy of ``rank``'s file, whose record it removes."""
        path = slot / find.rank_file(rank, self._world)
        record_path(path).unlink(missing_ok=True)
        image = self._kept.open(path, size)
        return SlotCopy(rank, path, image, torch.empty(of_record, dtype=torch.uint8))

    def close(self) -> None:
        """Drop the copies' mappings; the files stay."""
        self._kept.close()


def hashed(staged: Staged) -> RankRecord:
    """Return the record of ``staged`` with the hashes of the file."""
    image, hasher = bytes_view(staged.image), FileHasher(staged.plan.stretches)
    for start in range(0, len(image), BLOCK):
        hasher.update(image[start : start + BLOCK])
    hashes, report = hasher.result(), staged.record.report
    entry = replace(report.file, hash=hashes.file, blocks=hashes.blocks)
    return replace(staged.record, report=replace(report, file=entry))
