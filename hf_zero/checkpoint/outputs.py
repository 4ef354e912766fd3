"""The whole tensors that a checkpoint can give: parameters put together from chunks, and
buffers, slice by slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from hf_zero.checkpoint.contents import BUFFER
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.naming import bare
from hf_zero.checkpoint.opened import Checkpoint
from hf_zero.checkpoint.reshard import parameter_runs
from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.errors import ConfigError

CONVERT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """``length`` elements of a stored tensor, from ``start`` on."""

    file: TensorFile
    tensor: str
    start: int
    length: int

    @property
    def dtype(self) -> torch.dtype:
        return self.file.entries[self.tensor].dtype


@dataclass(frozen=True)
class Output:
    """A whole tensor to be given out as ``name`` in ``dtype``; ``held`` is its name in the
    checkpoint.
    """

    name: str
    held: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_buffer: bool = False
    raw: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def sources(self, checkpoint: Checkpoint, start: int, stop: int) -> Iterator[Source]:
        """Where elements ``[start, stop)`` lie, in order."""
        if self.is_buffer:
            yield Source(
                checkpoint.file(checkpoint.buffer_file()), BUFFER + self.held, start, stop - start
            )
            return
        for run in parameter_runs(checkpoint.manifest, self.held, start, stop):
            file = checkpoint.file(run.flat.chunks[run.chunk].file)
            yield Source(file, f"{run.flat.key}::{run.flat.weights}", run.source, run.length)

    def fill(self, checkpoint: Checkpoint, out: torch.Tensor) -> None:
        """Copy the whole tensor into ``out``, contiguous, on any device and of any dtype,
        through a small buffer.
        """
        flat, at = out.detach().view(-1), 0
        for source in self.sources(checkpoint, 0, self.numel):
            read_cast(source, flat[at : at + source.length], Scratch())
            at += source.length


class Scratch:
    """One buffer per dtype, reused: what a slice is read into and cast into."""

    ELEMENTS = 1 << 20

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, use: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        if (use, dtype) not in self._buffers:
            self._buffers[use, dtype] = torch.empty(self.ELEMENTS, dtype=dtype)
        return self._buffers[use, dtype][:count]


def read_cast(source: Source, out: torch.Tensor, scratch: Scratch) -> None:
    """Read ``source`` into ``out`` (1-D, as long as the source), casting where the dtypes
    differ.
    """
    if out.dtype == source.dtype and out.device.type == "cpu":
        source.file.read_into(source.tensor, source.start, out)
        return
    for at in range(0, source.length, scratch.ELEMENTS):
        part = scratch.get("read", source.dtype, min(scratch.ELEMENTS, source.length - at))
        source.file.read_into(source.tensor, source.start + at, part)
        out[at : at + part.numel()].copy_(part)


def dtype_option(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """``dtype`` as torch's. Raises ConfigError for one that a model is not converted to."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in CONVERT_DTYPES:
        raise ConfigError(
            f"dtype {dtype!r} is not one that a checkpoint can be converted to; pass "
            f"{', '.join(CONVERT_DTYPES)}, or none at all"
        )
    return None if dtype is None else CONVERT_DTYPES[name]


def outputs(
    manifest: Manifest, dtype: torch.dtype | None = None, exclude_frozen: bool = False
) -> list[Output]:
    """Parameters in the model's order, then buffers, under the names by which the checkpoint holds
    them, less what wrappers put into them.

    ``dtype`` None gives each parameter the dtype it had when it was handed to training. Only
    floating-point parameters that are not raw are cast; buffers keep theirs, as they do in
    training.
    """
    made = []
    for name, own in manifest.parameters.items():
        flat, slot = manifest.slots[name]
        if exclude_frozen and not flat.trainable:
            continue
        given = own if dtype is None or flat.raw or not own.is_floating_point else dtype
        made.append(Output(bare(name), name, given, slot.shape, raw=flat.raw))
    return made + [
        Output(bare(name), name, own, shape, is_buffer=True)
        for name, (own, shape) in manifest.buffers.items()
    ]
