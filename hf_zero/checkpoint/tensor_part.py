"""A rank's elements of one tensor, in a state dict of ``torch.distributed.checkpoint``.

[Note: parts instead of DTensors]
A rank owns a range of the elements of a flattened parameter, which begins and ends within a row: no
placement of a DTensor describes that without moving elements. So a state dict holds
:class:`TensorPart` in its place, which implements torch's protocol for tensors that name their own
chunks: the range as boxes of the whole tensor, at most two for each dimension. To torch, a
checkpoint written from parts is like that of any other program, and parts read any checkpoint that
torch reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_zero.errors import CheckpointError
from hf_zero.zero.layout.box import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


class PartPosition(NamedTuple):
    """The position of a rank's elements in a tensor. shape: of the part that this rank has along
    other axes. start: the first element in it. box: of that part in the whole tensor, None if it is
    the whole tensor.
    """

    shape: tuple[int, ...]
    start: int
    box: Box | None

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.shape if self.box is None else tuple(self.box.whole)


class TensorPart(torch.Tensor):
    """A rank's elements of one tensor, which has the whole tensor's shape.

    Attributes:
        local: the elements, 1-D.
        position: where they are in the whole tensor.
        pieces: (offsets in the whole tensor, view of ``local``) of each box of them.
    """

    local: torch.Tensor
    position: PartPosition
    pieces: list[tuple[tuple[int, ...], torch.Tensor]]

    @staticmethod
    def __new__(cls, local: torch.Tensor, position: PartPosition) -> TensorPart:
        part: TensorPart = torch.Tensor._make_wrapper_subclass(
            cls, position.whole, dtype=local.dtype, device=local.device
        )
        return part

    def __init__(self, local: torch.Tensor, position: PartPosition):
        self.local, self.position = local, position
        self.pieces = list(_pieces(local, position))

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"TensorPart({tuple(self.shape)}, {self.local.numel()} elements in {len(self.pieces)})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> TensorPart:
        part, operation = args[0], func.overloadpacket
        # of other operations, such as an addition to a plain tensor, the part may be any argument
        if isinstance(part, TensorPart):
            local, options = part.local, kwargs or {}
            if operation is torch.ops.aten.new_empty and list(args[1]) == list(part.shape):
                return TensorPart(local.new_empty(local.shape, **options), part.position)
            if operation in COPIES:
                return TensorPart(func(local, *args[1:], **options), part.position)
        raise CheckpointError(
            f"{func} on a part of a parameter in a state dict; save and load it with "
            "torch.distributed.checkpoint, or ask for whole tensors with "
            "StateDictOptions(full_state_dict=True)"
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), view.shape) for offsets, view in self.pieces
        ]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(view for offsets, view in self.pieces if offsets == tuple(index.offset))


COPIES = {torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy}


def _pieces(
    local: torch.Tensor, position: PartPosition
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the boxes of :class:`TensorPart`, of the elements ``local`` at ``position``. A tensor
    without elements is one box on every rank, so that checkpoints have its name.
    """
    (shape, start, box), at = position, 0
    if not math.prod(shape):
        yield tuple(0 for _ in shape), local.view(shape)
    for offsets, sizes in _boxes(shape, start, start + local.numel()):
        view = local[at : at + math.prod(sizes)].view(sizes)
        at += view.numel()
        parts = [(offsets, view)]
        for dim, ranges in box.cuts if box is not None else ():
            parts = [piece for part in parts for piece in _within(*part, dim, ranges)]
        yield from parts


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that elements ``[start, stop)`` of the flattened tensor
    of ``shape`` form, in their order.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, first = divmod(start, row)
        if not first and stop - start >= row:
            rows = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(row, stop - index * row)
            for offsets, sizes in _boxes(shape[1:], first, end):
                yield (index, *offsets), (1, *sizes)
            start = index * row + end


def _within(
    offsets: tuple[int, ...], view: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the boxes of ``view`` in the whole tensor, of which a part holds ``ranges`` of
    dimension ``dim``, end to end.
    """
    low, high, base = offsets[dim], offsets[dim] + view.shape[dim], 0
    for start, stop in ranges:
        first, last = max(low, base), min(high, base + stop - start)
        if first < last:
            at = (*offsets[:dim], start + first - base, *offsets[dim + 1 :])
            yield at, view.narrow(dim, first - low, last - first)
        base += stop - start
