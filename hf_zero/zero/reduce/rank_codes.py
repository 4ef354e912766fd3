"""Codes that tell, in sums over the ranks, whether all ranks have the same value; the check that
all have the same settings.

[Note: codes of ranks]
A rank adds a code, and the square of the code, to the message of a step. Over n ranks, the square
of the sum of the codes is n times the sum of the squares if and only if all codes are equal.

Ranks that a script has given different settings since ``initialize``, options of parameter groups
or requires_grad, train different models; of different hooks after the step, one rank waits for the
others. All ranks read the same sums at the same step, so that all raise there:

- a sum in host memory in the step itself, or in the next one where replicas add it up beside the
  step (stage 0, groups of replicas);
- a sum on a device :data:`STEPS_AHEAD` steps later, once it is copied: a host that is further ahead
  of its device waits for the copy, while the device has a step queued.
"""

from __future__ import annotations

import ctypes
import zlib
from operator import itemgetter
from typing import NoReturn

import torch

from hf_zero.device import graphs, kinds, pinned, streams
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import RankMismatchError

CODES = 1 << 20  # the sum of the squares of so many is exact in fp64, over 8,192 ranks
STEPS_AHEAD = 2  # of the host, after which it reads what a device has summed


def numbers_of(code: int, device: torch.device) -> torch.Tensor:
    """Return what a rank with ``code`` adds to a message: [2] fp64, on ``device``."""
    return pinned.upload(torch.tensor([code, code * code], dtype=torch.float64), device)


def are_equal(sums: torch.Tensor, ranks: int) -> bool:
    """Return whether the codes of ``ranks`` are equal, by the ``sums`` of their numbers: [2] fp64
    in host memory, contiguous. No operation of torch, which could wait for a device.
    """
    total, squares = map(int, (ctypes.c_double * 2).from_address(sums.data_ptr()))
    return total * total == ranks * squares


class SettingsCheck:
    """The comparison of what scripts have set, among the ranks of one pipeline stage (``mesh``)."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._on_host = kinds.is_synchronous(device)
        self._settings, self._numbers = "", numbers_of(0, device)
        # of the last step, in host memory once the collective is over
        self._unread: tuple[torch.Tensor, Handle] | None = None
        # of the last steps on a device, by step modulo their number: sums, [2] in pinned memory,
        # and the events after their copies
        self._copies: list[torch.Tensor] = []
        self._copied: list[streams.Event | None] = [None] * STEPS_AHEAD
        self._step = 0

    def numbers(self, settings: str) -> torch.Tensor:
        """Begin a step with ``settings``, in words: return what this rank adds to its message, [2]
        fp64 on the device. Compares the sums of an earlier step first; raises as :meth:`receive`.
        """
        if not self._on_host and graphs.capturing():
            return self._numbers
        copied, self._copied[self._step] = self._copied[self._step], None
        if copied is not None:
            copied.synchronize()
            if not are_equal(self._copies[self._step], self._mesh.pp_stage_ranks):
                self._refuse()
        if self._unread is not None:
            (sums, handle), self._unread = self._unread, None
            handle.wait()
            self.receive(sums)
        if settings != self._settings:
            self._settings = settings
            self._numbers = numbers_of(zlib.crc32(settings.encode()) % CODES, self._device)
        return self._numbers

    def receive(self, sums: torch.Tensor, handle: Handle | None = None) -> None:
        """Take the ``sums`` [2] of the numbers over all ranks, which are complete once ``handle``
        has been waited for. Raises RankMismatchError, on all ranks, for different settings: here
        or, as the note says, in :meth:`numbers` of a later step.
        """
        if sums.is_meta or (not self._on_host and graphs.capturing()):
            return
        if handle is not None:
            self._unread = sums, handle
        elif self._on_host:
            if not are_equal(sums, self._mesh.pp_stage_ranks):
                self._refuse()
        else:
            if not self._copies:
                self._copies = [pinned.empty(2, torch.float64) for _ in self._copied]
            self._copies[self._step].copy_(sums, non_blocking=True)
            self._copied[self._step] = streams.record_here(self._device)
            self._step = (self._step + 1) % STEPS_AHEAD

    def _refuse(self) -> NoReturn:
        """Raise RankMismatchError with the settings of the ranks, all of which have read the same
        sums at this step (collective).
        """
        texts = self._mesh.all_gather_object(self._settings, "settings")
        # the first rank with each text
        firsts = dict(zip(reversed(texts), reversed(self._mesh.ranks)))
        settings = "; ".join(
            f"rank {rank} has {text or 'changed nothing'}"
            for text, rank in sorted(firsts.items(), key=itemgetter(1))
        )
        raise RankMismatchError(
            f"ranks train with different settings, as changed since initialize: {settings}. Make "
            "such a change (an option of a parameter group, requires_grad, a hook) on every rank, "
            "or on none"
        )
