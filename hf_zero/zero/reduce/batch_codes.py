"""Codes of the first batches, which tell whether all ranks train on the same rows, as those of a
loader that is not divided among them do: they do the work of one.

Only the first steps of an engine have such codes in their messages. Rank 0 reads the sums, once a
device has copied them, and warns.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from enum import Enum, auto

import torch

from hf_zero.device import kinds, pinned, streams
from hf_zero.distributed.mesh import Mesh
from hf_zero.logging import logger
from hf_zero.zero.layout.tree import tensors_in
from hf_zero.zero.reduce.rank_codes import CODES, are_equal, numbers_of

STEPS = 2  # equal batches of one step may be a coincidence, such as a constant warm-up batch
SAMPLES = 1 << 16  # elements of a tensor that its code covers at least, and less than twice as many
SCALARS = (str, bytes, int, float, bool)


class BatchComparison(Enum):
    """How far the comparison of the first batches has come on this rank."""

    SENDING = auto()  # messages of steps have a code
    SENT = auto()  # rank 0 has the sums of the last of them, and reads them at the next forward
    ENDED = auto()


class BatchCodes:
    """Codes of this rank's batches in the first steps. Ranks that share a batch by a tensor-,
    sequence- or context-parallel axis, or by a pipeline, are not compared.
    """

    def __init__(self, mesh: Mesh):
        self._ranks, self._rank, self._device = mesh.dims.world, mesh.rank, mesh.device
        data_parallel = mesh.dims.data == mesh.dims.world
        self._left = STEPS if data_parallel and self._ranks > 1 else 0  # messages with a code
        self._state = BatchComparison.SENDING if self._left else BatchComparison.ENDED
        self.active = self._left > 0  # until the end of the comparison; a property costs a call
        self._trusts = False  # a loader divides the batches
        self._code: int | None = None  # of the first batch of the step
        self._sums: list[torch.Tensor] = []  # of the messages that were sent
        self._copied: streams.Event | None = None  # recorded after their copy to the host

    @property
    def awaits_batch(self) -> bool:
        """Return whether :meth:`record` has something to do."""
        if self._state is BatchComparison.SENDING:
            return self._code is None and not self._trusts
        return self._state is BatchComparison.SENT

    def trust_loader(self) -> None:
        """Compare no further batches: a loader divides them, whose rows may be equal."""
        self._trusts, self._code = True, None

    def record(self, batch: object) -> None:
        """Compute the code of ``batch``, the arguments of a forward that trains: all values, of
        large tensors a regular sample; waits for the device. After the first steps compare them,
        once the device has copied their sums.
        """
        if torch._C._are_functorch_transforms_active():  # tensors without values
            return
        if self._state is BatchComparison.SENT:
            self._compare()
        elif self.awaits_batch:
            digest, has_tensors = 0, False
            for value in _values_of(batch):
                if isinstance(value, torch.Tensor):
                    has_tensors = True
                    flat = value.detach().flatten()
                    flat = flat[:: max(1, flat.numel() // SAMPLES)].cpu().resolve_conj()
                    value = flat.contiguous().view(torch.uint8).numpy().tobytes()
                else:
                    value = repr(value).encode()
                digest = zlib.crc32(value, digest)
            # a batch without tensors says nothing of rows: the codes of ranks differ then
            self._code = digest % CODES if has_tensors else self._rank

    def numbers(self) -> list[torch.Tensor]:
        """Return [code and its square] for the message of a step; [] after the first steps."""
        if not self._left:
            return []
        return [numbers_of(self._rank if self._code is None else self._code, self._device)]

    def end_step(self, sums: torch.Tensor) -> None:
        """End a step with the ``sums``, over all ranks, of its :meth:`numbers`, which rank 0 keeps:
        after the last one on its host, without waiting for the device.
        """
        self._left -= 1
        self._code = None
        if not (sums.is_meta or self._rank):  # of a simulation
            self._sums.append(sums)
        if self._left:
            return
        self._state = BatchComparison.SENT if self._sums else BatchComparison.ENDED
        self.active = self._state is BatchComparison.SENT
        if self._sums and not kinds.is_synchronous(self._device):
            on_host = pinned.empty(STEPS * 2, torch.float64).view(STEPS, 2)
            on_host.copy_(torch.stack(self._sums), non_blocking=True)
            self._sums, self._copied = list(on_host.unbind()), streams.record_here(self._device)

    def _compare(self) -> None:
        """Warn if the batches of each of the first steps were equal on all ranks, and end."""
        if self._copied is not None and not self._copied.query():
            return
        equal = all(are_equal(sums, self._ranks) for sums in self._sums)
        self._sums, self._copied = [], None
        self._state, self.active = BatchComparison.ENDED, False
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
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _scalars_in(item)
