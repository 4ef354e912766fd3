"""Expressions for weights that are quantised in blocks while they are read: of the source, a rank
reads the blocks that its own elements come from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hf_zero.loading.expressions import Expression

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
        base = self._base if self.sliceable else _Whole(self._base)
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


class _Whole(Expression):
    """An expression that is not sliceable, read once for all ranges."""

    def __init__(self, base: Expression):
        super().__init__(base.shape, base.dtype)
        self._values = base.whole().reshape(-1)

    def read(self, start: int, out: torch.Tensor) -> None:
        out.copy_(self._values[start : start + out.numel()])


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
