"""Whole tensors out of the chunks of a checkpoint, slice by slice, and which of them are chosen."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch

from hf_zero.checkpoint.engine_state import BUFFER
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.reader import Checkpoint, parameter_ranges
from hf_zero.checkpoint.records import strip_wrappers
from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.errors import ConfigError

CONVERT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SourceRange:
    """``length`` elements of a stored tensor, from ``start`` on."""

    file: TensorFile
    tensor: str
    start: int
    length: int

    @property
    def dtype(self) -> torch.dtype:
        return self.file.entries[self.tensor].dtype


@dataclass(frozen=True)
class OutputTensor:
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

    def sources(self, checkpoint: Checkpoint, start: int, stop: int) -> Iterator[SourceRange]:
        """Where elements ``[start, stop)`` lie, in order."""
        if self.is_buffer:
            yield SourceRange(
                checkpoint.file(checkpoint.buffer_file()), BUFFER + self.held, start, stop - start
            )
            return
        for run in parameter_ranges(checkpoint.manifest, self.held, start, stop):
            file = checkpoint.file(run.flat.chunks[run.chunk].file)
            yield SourceRange(file, f"{run.flat.key}::{run.flat.weights}", run.source, run.length)

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


def read_cast(source: SourceRange, out: torch.Tensor, scratch: Scratch) -> None:
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
) -> list[OutputTensor]:
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
        made.append(OutputTensor(strip_wrappers(name), name, given, slot.shape, raw=flat.raw))
    return made + [
        OutputTensor(strip_wrappers(name), name, own, shape, is_buffer=True)
        for name, (own, shape) in manifest.buffers.items()
    ]


def choose(
    held: Sequence[OutputTensor], only: str | Sequence[str] | None, remedy: str = ""
) -> list[OutputTensor]:
    """Of ``held`` those whose name, as it is written or as it is held, fits one of the patterns
    ``only`` (``*``, ``?``, ``[…]``).

    ``remedy`` is added to the message of a pattern that fits nothing. Raises ConfigError naming it
    and the names that are near.
    """
    if only is None:
        return list(held)
    patterns = [only] if isinstance(only, str) else list(only)
    if not patterns:
        raise ConfigError(
            "only=[] chooses nothing; pass patterns over the names of tensors, or none at all"
        )
    chosen: set[int] = set()
    for pattern in patterns:
        fitting = {
            place
            for place, output in enumerate(held)
            if fnmatchcase(output.name, pattern) or fnmatchcase(output.held, pattern)
        }
        if not fitting:
            raise ConfigError(
                f"only={pattern!r} fits no tensor; "
                f"{_near(pattern, [output.name for output in held])}{remedy}"
            )
        chosen |= fitting
    return [output for place, output in enumerate(held) if place in chosen]


def _near(pattern: str, names: Sequence[str]) -> str:
    bare = pattern.strip("*")
    near = [
        name for name in names if bare and bare.lower() in name.lower()
    ] or difflib.get_close_matches(bare, names, 3, 0.4)
    found = ", ".join((near or list(names))[:3])
    return (
        f"names near it are {found}"
        if near
        else f"there are {len(names)} names, such as {found}"
        if names
        else "there are none"
    )
