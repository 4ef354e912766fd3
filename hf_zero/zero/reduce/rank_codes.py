"""Codes of the settings and of the first batches of each rank, compared in the message of a step.

Ranks that a script has given different settings since ``initialize``, options of parameter groups
or requires_grad, train different models. Ranks that train on the same rows, as those of a loader
that is not divided among them do, do the work of one.

[Note: two numbers]
A rank adds a code, and the square of the code, to the message that each step sends anyway
(norm.py). Over n ranks, the square of the sum of the codes is n times the sum of the squares if and
only if all codes are equal. A sum in host memory is read in the step itself, or, where the step
does not wait for its message (stage 0), in the next one. From a device it is copied, and read in a
later step, once the copy is over: the host waits for nothing. Only the first steps of an engine
have codes of batches in their messages.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping
from operator import itemgetter

import torch

from hf_zero.device import graphs, kinds, pinned, streams
from hf_zero.device.pinned import upload
from hf_zero.distributed.collective_log import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import RankMismatchError
from hf_zero.logging import logger
from hf_zero.zero.layout.tree import tensors_in

CODES = 1 << 20  # the sum of the squares of so many is exact in fp64, over 8,192 ranks
STEPS = 2  # equal batches of one step may be a coincidence, such as a constant warm-up batch
SAMPLES = 1 << 16  # elements of a tensor that its code covers
SCALARS = (str, bytes, int, float, bool)


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


class BatchCodes:
    """Codes of this rank's batches in the first steps. Ranks that share a batch by a tensor-,
    sequence- or context-parallel axis, or by a pipeline, are not compared.
    """

    def __init__(self, mesh: Mesh):
        self._ranks, self._rank, self._device = mesh.dims.world, mesh.rank, mesh.device
        data_parallel = mesh.dims.data == mesh.dims.world
        self._left = STEPS if data_parallel and self._ranks > 1 else 0  # messages with a code
        self.active = self._left > 0  # until the first steps have been compared
        self._batches_left = self._left  # to compute codes of
        self._code: int | None = None  # of the first batch of the step
        self._sums: list[torch.Tensor] = []  # of the messages that were sent
        self._copied: streams.Event | None = None  # recorded after their copy to the host

    @property
    def awaits_batch(self) -> bool:
        """Return whether :meth:`record` has something to do."""
        return (self._batches_left > 0 and self._code is None) or bool(self._sums)

    @property
    def allowance(self) -> int:
        """Numbers that the codes add to a message."""
        return 2 if self._left else 0

    def trust_loader(self) -> None:
        """Compare no further batches: a loader divides them, whose rows may be equal."""
        self._batches_left, self._code = 0, None

    def record(self, batch: object) -> None:
        """Compute the code of ``batch``, the arguments of a forward that trains: all values, of
        large tensors a regular sample; waits for the device. After the first steps compare them,
        once the device has their sums.
        """
        if torch._C._are_functorch_transforms_active():  # tensors without values
            return
        if not self._left:
            self._compare()
        if not self._batches_left or self._code is not None:
            return
        self._batches_left -= 1
        digest, has_tensors = 0, False
        for value in _values_of(batch):
            if isinstance(value, torch.Tensor):
                has_tensors = True
                flat = value.detach().flatten()
                flat = flat[:: max(1, flat.numel() // SAMPLES)].cpu().resolve_conj().contiguous()
                value = flat.view(torch.uint8).numpy().tobytes()
            else:
                value = repr(value).encode()
            digest = zlib.crc32(value, digest)
        # a batch without tensors says nothing of rows: the codes of ranks differ then
        self._code = digest % CODES if has_tensors else self._rank

    def numbers(self) -> torch.Tensor | None:
        """Return the code and its square for the message of a step; None after the first steps."""
        if not self._left:
            return None
        return numbers_of(self._rank if self._code is None else self._code, self._device)

    def end_step(self, sums: torch.Tensor) -> None:
        """Keep ``sums``, over all ranks, of the :meth:`numbers` of a step, on the rank that warns:
        after the last one on its host, without waiting for the device.
        """
        self._left -= 1
        self._code = None
        if not (sums.is_meta or self._rank):  # of a simulation
            self._sums.append(sums)
        self.active = bool(self._left or self._sums)
        if not self._sums:
            return
        if not self._left and not kinds.is_synchronous(self._device):
            on_host = pinned.empty(STEPS * 2, torch.float64).view(STEPS, 2)
            on_host.copy_(torch.stack(self._sums), non_blocking=True)
            self._sums, self._copied = list(on_host.unbind()), streams.record_here(self._device)

    def _compare(self) -> None:
        """Warn if the batches of each of the first steps were equal on all ranks."""
        if not self._sums or (self._copied is not None and not self._copied.query()):
            return
        equal = all(are_equal(sums, self._ranks) for sums in self._sums)
        self._sums, self._copied, self.active = [], None, False
        if equal:
            logger.warning(
                "all %d ranks have trained on the same batches in the first %d steps, so that "
                "together they do the work of one; unless the rows themselves are equal, pass the "
                "data loader to accelerator.prepare() or the data set to "
                "hf_zero.initialize(training_data=...), or give the loader a "
                "torch.utils.data.DistributedSampler",
                self._ranks,
                STEPS,
            )


def _values_of(batch: object) -> Iterator[object]:
    """Yield the tensors with values in host or device memory, then the scalars, of ``batch``."""
    for tensor in tensors_in(batch):
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and not tensor.is_meta and tensor.numel():
            yield tensor
    yield from _scalars_in(batch)


def _scalars_in(value: object) -> Iterator[object]:
    if isinstance(value, SCALARS):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _scalars_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _scalars_in(item)
