"""Expressions for the elements of a lazy tensor: ranges of files, seen through views,
concatenations and casts.

An expression has a shape and a dtype and can read any range ``[start, stop)`` of its elements in
row-major order. It is *sliceable* if reading a part costs about that part; other expressions are
read whole, by one rank.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_zero.checkpoint.tensorfile import TensorFile

# With shorter contiguous runs, the calls cost more than reading the whole tensor.
RUN_BYTES = 4096
BLOCK = 1 << 20  # elements converted at a time

Size = tuple[int, ...]
_drawing = threading.RLock()  # guards the default generator, which threads share


class Expression:
    """A tensor defined by its origin."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        self.shape: Size = tuple(shape)
        self.dtype = dtype
        self.sliceable = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Any, ...]:
        """Key of the elements: equal for two views of the same elements."""
        return (id(self),)

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, contiguous, CPU, of this dtype) with elements from ``start`` on."""
        raise NotImplementedError

    def whole(self) -> torch.Tensor:
        """Return all elements, in this shape."""
        out = torch.empty(self.numel, dtype=self.dtype)
        self.read(0, out)
        return out.view(self.shape)


class InFile(Expression):
    """A tensor of a safetensors file."""

    def __init__(self, file: TensorFile, name: str):
        entry = file.entries[name]
        super().__init__(entry.shape, entry.dtype)
        self._file, self._name = file, name

    def read(self, start: int, out: torch.Tensor) -> None:
        if out.numel():
            self._file.read_into(self._name, start, out)


class InMemory(Expression):
    """A tensor in memory: mapped from a file of another format, or an intermediate result."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor.detach()

    def read(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self._tensor.reshape(-1)[start : start + out.numel()])


class Strided(Expression):
    """A view: ``shape`` elements of ``root`` in row-major order, by ``strides`` from ``offset``."""

    def __init__(self, root: Expression, shape: Sequence[int], strides: Sequence[int], offset: int):
        super().__init__(shape, root.dtype)
        self.root, self.strides, self.offset = root, tuple(strides), offset
        self._depth, self._run = _runs(self.shape, self.strides)
        self._in_runs = self._run >= self.numel or (
            root.sliceable and self._run * self.dtype.itemsize >= RUN_BYTES
        )
        self.sliceable = root.sliceable and self._in_runs

    def read(self, start: int, out: torch.Tensor) -> None:
        if not out.numel():
            return
        if not self._in_runs:
            out.copy_(self._gathered().reshape(-1)[start : start + out.numel()])
            return
        at = 0
        while at < out.numel():
            row, within = divmod(start + at, self._run)
            count = min(self._run - within, out.numel() - at)
            self.root.read(self._start_of(row) + within, out[at : at + count])
            at += count

    @property
    def place(self) -> tuple[Any, ...]:
        return id(self.root), self.shape, self.strides, self.offset

    def _start_of(self, row: int) -> int:
        position = self.offset
        for size, stride in zip(
            reversed(self.shape[: self._depth]), reversed(self.strides[: self._depth])
        ):
            row, index = divmod(row, size)
            position += index * stride
        return position

    def _gathered(self) -> torch.Tensor:
        return self.root.whole().reshape(-1).as_strided(self.shape, self.strides, self.offset)


def _runs(shape: Size, strides: Size) -> tuple[int, int]:
    """Merge the contiguous trailing dimensions into one run. Returns the number of leading
    dimensions left, and the run's length in elements.
    """
    run, depth = 1, len(shape)
    while depth and (shape[depth - 1] == 1 or strides[depth - 1] == run):
        depth -= 1
        run *= shape[depth]
    return depth, run


class Joined(Expression):
    """Concatenation of ``parts`` along dimension ``dim``."""

    def __init__(self, parts: Sequence[Expression], dim: int):
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype)
        self._parts, self._dim = parts, dim
        # elements of each part in one row, that is, for one index of the dimensions before `dim`
        self._widths = [math.prod(part.shape[dim:]) for part in parts]
        row = sum(self._widths)
        shortest = min((width for width in self._widths if width), default=0)
        partly = all(part.sliceable for part in parts)
        self._in_runs = row >= self.numel or (
            partly and shortest * self.dtype.itemsize >= RUN_BYTES
        )
        self.sliceable = partly and self._in_runs

    def read(self, start: int, out: torch.Tensor) -> None:
        if not self._in_runs:
            out.copy_(
                torch.cat([part.whole() for part in self._parts], self._dim).reshape(-1)[
                    start : start + out.numel()
                ]
            )
            return
        row, at = sum(self._widths), 0
        while at < out.numel():
            outer, within = divmod(start + at, row)
            for part, width in zip(self._parts, self._widths):
                if within < width:
                    count = min(width - within, out.numel() - at)
                    part.read(outer * width + within, out[at : at + count])
                    at += count
                    break
                within -= width


class Cast(Expression):
    """Another expression in another dtype."""

    def __init__(self, base: Expression, dtype: torch.dtype):
        super().__init__(base.shape, dtype)
        self.base, self.sliceable = base, base.sliceable

    def read(self, start: int, out: torch.Tensor) -> None:
        if not self.sliceable:
            out.copy_(self.base.whole().reshape(-1)[start : start + out.numel()])
            return
        buffer = torch.empty(min(BLOCK, out.numel()), dtype=self.base.dtype)
        for at in range(0, out.numel(), BLOCK):
            part = out[at : at + BLOCK]
            self.base.read(start + at, buffer[: part.numel()])
            part.copy_(buffer[: part.numel()])


class Computed(Expression):
    """Result of an operation other than a view: its inputs are read whole."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[], torch.Tensor],
        name: str,
    ):
        super().__init__(shape, dtype)
        self._compute, self.name, self.sliceable = compute, name, False

    def read(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self.whole().reshape(-1)[start : start + out.numel()])

    def whole(self) -> torch.Tensor:
        return self._compute()


class Filled(Expression):
    """A tensor under initialization: ``base`` (uninitialized memory if None), and in-place writes
    that are replayed when it is read.

    Random numbers come from its own seed, drawn from the default generator at construction, so that
    every read gives the same values.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        base: Expression | None = None,
        memory: torch.Tensor | None = None,
    ):
        super().__init__(shape, dtype)
        self.sliceable = False
        # contiguous, of others too: writes go there at once
        self.memory = memory
        self._base = InMemory(memory) if memory is not None else base
        self.initialized = self._base is not None  # whether every element has a value
        self._seed = _new_seed()
        self._writes: list[Callable[[torch.Tensor], object]] = []

    def write(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        do: Callable[[torch.Tensor], object],
    ) -> None:
        """Record ``do``, which changes in place the given view of the elements."""
        self.initialized = self.initialized or math.prod(shape) == self.numel
        self._writes.append(
            lambda elements: do(
                elements.as_strided(
                    tuple(shape), tuple(strides), elements.storage_offset() + offset
                )
            )
        )

    def in_memory(self) -> torch.Tensor:
        """Return the values in memory, where writes go from now on."""
        if self.memory is None:
            self.memory = self.whole()
            self._base, self._writes = InMemory(self.memory), []
        return self.memory

    def copy(self) -> Filled:
        """Return a separate tensor with this one's values. Later draws of the two differ."""
        if self.memory is not None:
            return Filled(self.shape, self.dtype, memory=self.memory.clone())
        copied, seed = copy.copy(self), _new_seed()
        copied._writes = [*self._writes, lambda _: torch.default_generator.manual_seed(seed)]
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Filled:
        return self.copy()

    def read(self, start: int, out: torch.Tensor) -> None:
        if out.numel() < self.numel:
            out.copy_(self.whole().reshape(-1)[start : start + out.numel()])
            return
        if self._base is not None:
            self._base.read(0, out)
        with _drawing, torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(self._seed)
            for write in self._writes:
                write(out)


def _new_seed() -> int:
    return int(torch.randint(1 << 62, (), device="cpu"))


def strided_like(root: Expression, view: Any) -> Expression:
    """Return the part of ``root`` that corresponds to ``view``, a view of a meta tensor."""
    if (
        view.is_contiguous()
        and view.numel() == root.numel
        and tuple(view.shape) == root.shape
        and view.storage_offset() == 0
    ):
        return root
    return Strided(root, view.shape, view.stride(), view.storage_offset())


ELEMENTS = 1 << 16  # encoded at a time: libraries take several fp32 copies of them
Encode = Callable[[torch.Tensor], torch.Tensor]


class InBlocks(Expression):
    """``encode`` of another expression, which turns each ``block`` elements of it, from the first
    on, into ``numel`` elements of ``dtype``; of a last part of a block, into fewer.

    Reading a range encodes the blocks that it covers, some at a time.
    """

    def __init__(
        self,
        base: Expression,
        encode: Encode,
        block: int,
        numel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ):
        super().__init__(shape, dtype)
        self._base, self._encode, self._block, self._made = base, encode, block, numel
        self.sliceable = base.sliceable

    def read(self, start: int, out: torch.Tensor) -> None:
        base = self._base if self.sliceable else InMemory(self._base.whole())
        first, stop = start, start + out.numel()
        blocks = max(ELEMENTS // self._block, 1)
        while first < stop:
            begin = first // self._made
            count = min(blocks, -(-stop // self._made) - begin)
            source = begin * self._block
            numel = min(count * self._block, base.numel - source)
            values = torch.empty(numel, dtype=base.dtype)
            base.read(source, values)
            encoded = self._encode(values).reshape(-1)
            within = first - begin * self._made
            part = encoded[within : within + stop - first]
            out[first - start : first - start + part.numel()].copy_(part)
            first += part.numel()


class Together:
    """Several tensors that one call of ``compute`` returns by name. Each is kept until it is read,
    so that they are computed once.
    """

    def __init__(self, compute: Callable[[], dict[str, torch.Tensor]]):
        self._compute = compute
        self._kept: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, and drop it."""
        with self._lock:
            if name not in self._kept:
                self._kept = self._compute()
            return self._kept.pop(name)


class OneOf(Expression):
    """The tensor ``name`` among those of ``together``: read whole, by one rank."""

    def __init__(self, together: Together, name: str, shape: Sequence[int], dtype: torch.dtype):
        super().__init__(shape, dtype)
        self._together, self._name, self.sliceable = together, name, False

    def read(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self.whole().reshape(-1)[start : start + out.numel()])

    def whole(self) -> torch.Tensor:
        return self._together.take(self._name).cpu()
