"""Which flat buffers travel in one message: neighbours of one dtype, of a limited number of
elements together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_zero.units.flat_buffer import FlatBuffer


class Pack:
    """A message that is filled: ``limit`` elements of one dtype at most."""

    def __init__(self, limit: int):
        self.limit = limit
        self._elements = 0
        self._dtype: torch.dtype | None = None

    def has_room(self, elements: int, dtype: torch.dtype | None = None) -> bool:
        """Whether ``elements`` more may travel in it, of ``dtype`` where it is given."""
        alike = dtype is None or self._dtype in (None, dtype)
        return alike and self._elements + elements <= self.limit

    def add(self, elements: int, dtype: torch.dtype) -> None:
        self._elements, self._dtype = self._elements + elements, dtype

    def clear(self) -> None:
        self._elements, self._dtype = 0, None


def packs(flats: Iterable[FlatBuffer], limit: int) -> list[list[FlatBuffer]]:
    """``flats`` in their order, those together that one message of ``limit`` elements may carry;
    a larger one is alone.
    """
    found: list[list[FlatBuffer]] = []
    pack = Pack(limit)
    for flat in flats:
        if not found or not pack.has_room(flat.layout.padded, flat.dtype):
            found.append([])
            pack.clear()
        found[-1].append(flat)
        pack.add(flat.layout.padded, flat.dtype)
    return found
