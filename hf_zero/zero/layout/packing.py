"""Packing of flat buffers into messages: neighbours with one dtype and the same ranks, up to a
number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_zero.distributed.flat_mesh import FlatMesh
from hf_zero.zero.layout.flat_buffer import FlatBuffer


class Pack:
    """A message being filled: at most ``limit`` elements of one dtype, over one mesh."""

    def __init__(self, limit: int):
        self.limit = limit
        self._elements = 0
        self._kind: tuple[torch.dtype, FlatMesh] | None = None

    def has_room(
        self, elements: int, dtype: torch.dtype | None = None, mesh: FlatMesh | None = None
    ) -> bool:
        """Whether ``elements`` more fit, of ``dtype`` and on the ranks of ``mesh`` if these are
        given.
        """
        if self._elements + elements > self.limit:
            return False
        kind = self._kind
        return kind is None or (
            (dtype is None or dtype is kind[0])
            and (mesh is None or mesh is kind[1] or mesh.axes == kind[1].axes)
        )

    def add(self, elements: int, dtype: torch.dtype, mesh: FlatMesh) -> None:
        self._elements, self._kind = self._elements + elements, (dtype, mesh)

    def clear(self) -> None:
        self._elements, self._kind = 0, None


def packs(flats: Iterable[FlatBuffer], limit: int) -> list[list[FlatBuffer]]:
    """Split ``flats``, in order, into messages of at most ``limit`` elements; a larger one is
    alone.
    """
    found: list[list[FlatBuffer]] = []
    pack = Pack(limit)
    for flat in flats:
        if not found or not pack.has_room(flat.layout.padded, flat.dtype, flat.mesh):
            found.append([])
            pack.clear()
        found[-1].append(flat)
        pack.add(flat.layout.padded, flat.dtype, flat.mesh)
    return found
