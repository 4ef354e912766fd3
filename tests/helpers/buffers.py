"""Tensors between guards: memory around them that must stay as it is, and the reference in place
of the native core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from hf_zero.ops import native

GUARD = 64  # elements before and after
POISON = 0xA5


class Guarded:
    """Copies of tensors, ``offset`` elements off alignment, with poison on both sides."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._held: list[tuple[Tensor, int, int]] = []

    def __call__(self, values: Tensor) -> Tensor:
        start, numel, width = GUARD + self.offset, values.numel(), values.element_size()
        memory = torch.full(((start + numel + GUARD) * width,), POISON, dtype=torch.uint8)
        self._held.append((memory, start * width, (start + numel) * width))
        view = memory.view(values.dtype)[start : start + numel]
        view.copy_(values)
        return view

    def check(self) -> None:
        for memory, start, stop in self._held:
            assert bool((memory[:start] == POISON).all()) and bool(
                (memory[stop:] == POISON).all()
            ), "memory around a tensor was written"


@contextmanager
def reference() -> Iterator[None]:
    """The torch reference runs, as where there is no native core."""
    with mock.patch.object(native, "_loaded", lambda: (None, "a test switched it off")):
        yield


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` are equal bit for bit; any NaN equals any other."""
    if a.is_floating_point():
        both = a.isnan() & b.isnan()
        a, b = (
            torch.where(both, torch.zeros_like(x), x).contiguous().view(torch.uint8) for x in (a, b)
        )
    return torch.equal(a, b)
