"""Comparison of what a script has set on the ranks since ``initialize``: options of parameter
groups and requires_grad.

[Note: two numbers]
A rank adds a code of its settings, and the square of the code, to the message that each step sends
anyway (norm.py). Over n ranks, the square of the sum of the codes is n times the sum of the squares
if and only if all codes are equal. A sum in host memory is read in the step itself, or, where the
step does not wait for its message (stage 0), in the next one. From a device it is copied, and read
in a later step, once the copy is over: the host waits for nothing.
"""

from __future__ import annotations

import ctypes
import zlib
from operator import itemgetter

import torch

from hf_zero.device import graphs, kinds, pinned, streams
from hf_zero.device.pinned import upload
from hf_zero.distributed.collectives import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import RankMismatchError

CODES = 1 << 20  # the sum of the squares of so many is exact in fp64, over 8,192 ranks


def numbers_of(code: int, device: torch.device) -> torch.Tensor:
    """Return what a rank with ``code`` adds to a message: [2] fp64, on ``device``."""
    return upload(torch.tensor([code, code * code], dtype=torch.float64), device)


def are_equal(sums: torch.Tensor, ranks: int) -> bool:
    """Return whether the codes of ``ranks`` are equal, by the ``sums`` of their numbers: [2] fp64
    in host memory, contiguous. No operation of torch, which could wait for a device.
    """
    total, squares = map(int, (ctypes.c_double * 2).from_address(sums.data_ptr()))
    return total * total == ranks * squares


class SettingsCheck:
    """The comparison among the ranks of ``mesh`` of one pipeline stage."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._on_host = kinds.is_synchronous(device)
        self._device = device
        self._settings = ""
        # sums that no wait has completed
        self._unread: tuple[torch.Tensor, Handle] | None = None
        self._copy: torch.Tensor | None = None  # [2] in pinned memory
        self._copied: streams.Event | None = None

    def change(self, settings: str) -> bool:
        """Compare ``settings``, in words, from now on; return whether they are new."""
        is_new = settings != self._settings and not graphs.capturing()
        if is_new:
            self._settings = settings
        return is_new

    def upload(self) -> torch.Tensor:
        """Return what this rank adds to a message: [2] fp64, on the device."""
        return numbers_of(zlib.crc32(self._settings.encode()) % CODES, self._device)

    def receive(self, sums: torch.Tensor, handle: Handle | None = None) -> None:
        """Take the ``sums`` [2] of the numbers over all ranks, which are complete once ``handle``
        has been waited for. Raises RankMismatchError, on all ranks, for different settings.
        """
        if sums.is_meta or (not self._on_host and graphs.capturing()):
            return
        if handle is not None:
            self._unread = sums, handle
        elif self._on_host:
            if not are_equal(sums, self._mesh.pp_stage_ranks):
                self._refuse()
        elif self._settings and self._copied is None:
            if self._copy is None:
                self._copy = pinned.empty(2, torch.float64)
            self._copy.copy_(sums, non_blocking=True)
            self._copied = streams.record_here(self._device)

    def look(self) -> None:
        """Compare the sums of earlier steps that have come. Raises as :meth:`receive`."""
        if not self._on_host and graphs.capturing():
            return
        if self._copied is not None and self._copied.query():
            assert self._copy is not None
            self._copied = None
            if not are_equal(self._copy, self._mesh.pp_stage_ranks):
                self._refuse()
        if self._unread is not None:
            (sums, handle), self._unread = self._unread, None
            handle.wait()
            self.receive(sums)

    def _refuse(self) -> None:
        """Raise RankMismatchError with the settings of the ranks, which differ."""
        ranks, texts = [self._mesh.rank], [self._settings]
        if self._on_host:  # all ranks are here
            ranks = list(self._mesh.ranks)
            texts = self._mesh.all_gather_object(self._settings, "settings")
        firsts = dict(zip(reversed(texts), reversed(ranks)))  # the first rank with each text
        settings = "; ".join(
            f"rank {rank} has {text or 'changed nothing'}"
            for text, rank in sorted(firsts.items(), key=itemgetter(1))
        )
        raise RankMismatchError(
            f"ranks train with different settings, as changed since initialize: {settings}. Make "
            "such a change (of an option of a parameter group, of requires_grad) on every rank, or "
            "on none"
        )
