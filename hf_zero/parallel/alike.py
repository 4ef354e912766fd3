"""Detect ranks that have diverged: compare hashes of tensors before some of the forwards."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch

from hf_zero.distributed.collectives import MeshDim

EVERY = 256  # calls between two comparisons; the first comparisons are closer together


def due(count: int) -> bool:
    """Return whether call number ``count`` is compared: the first, second, fourth and so on, then
    every :data:`EVERY` calls.
    """
    return count % EVERY == 0 or (count < EVERY and count & (count - 1) == 0)


class Calls:
    """Counter of a model's calls, restarted at each change between training and evaluation."""

    def __init__(self) -> None:
        self._training: bool | None = None
        self._count = 0

    def restart(self) -> None:
        self._count = 0

    def due(self, training: bool) -> bool:
        """Count one call and return whether it is :func:`due`."""
        if training is not self._training:
            self._training, self._count = training, 0
        self._count += 1
        return due(self._count)


def differing(
    dims: Sequence[MeshDim], codes: Sequence[int | None], device: torch.device, name: str
) -> list[bool]:
    """Return for each of ``codes`` whether it differs between ranks along ``dims`` (collective). A
    rank that does not know a code passes None.
    """
    unknown = -torch.inf
    messages = [sign * code if code is not None else unknown for code in codes for sign in (1, -1)]
    most = torch.tensor(messages, dtype=torch.float64, device=device)
    for dim in dims:
        dim.all_reduce(most, name, maximum=True).wait()
    return [
        highest != -lowest and highest != unknown for highest, lowest in most.view(-1, 2).tolist()
    ]


def hash_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return a 32-bit hash of ``tensors`` (shape, dtype, values). The host waits for the device."""
    code = 0
    for tensor in tensors:
        code = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), code)
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        code = zlib.crc32(content.numpy().tobytes(), code)
    return code
