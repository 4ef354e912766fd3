"""Flat layouts: the place of each element of each parameter. Arithmetic only: no torch, no device,
no communication.

A :class:`FlatLayout` places parameters one after another in one flat buffer and cuts the buffer
into shards of one size. Everything that moves parameters (partitioning, optimizer segments, saving,
loading on another number of ranks, exporting, estimating) is an intersection of ranges over such a
layout.

[Note: alignment]
A parameter of two or more dimensions begins at a multiple of 128 bytes: loads of 16 bytes, TMA and
grouped GEMMs need it, whatever is before it in the buffer. One of LARGE or more elements begins at
a multiple of BLOCK elements, and so does every shard of a layout that has one: a block of BLOCK of
its elements, which block-wise optimizer state has a scale for, is then on one rank, and the blocks
are the same on any number of ranks. The elements between two parameters, like those after the
last, are padding: zero in shards, gradients and optimizer state, undefined in a gathered buffer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

from hf_zero.logging import JsonObject
from hf_zero.zero.layout.box import Box

T = TypeVar("T")

ALIGNMENT = 8  # elements; a shard of 16-bit elements then starts on a 16-byte boundary
MATRIX_ALIGNMENT = 128  # bytes
LARGE, BLOCK = 4096, 256  # elements


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: ``offset`` and ``numel`` in elements of the flat buffer. ``box``:
    its part of a larger tensor, if cut.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    box: Box | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.shape if self.box is None else self.box.whole

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class ParameterRange:
    """A run of elements of one parameter: ``[start, stop)`` of the parameter is ``[offset,
    offset+len)`` of the flat buffer.
    """

    name: str
    start: int
    stop: int
    offset: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Parameters in ascending order, aligned and padded as the note says, and cut into
    ``num_shards`` shards of one size.
    """

    slots: tuple[Slot, ...]
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(
                f"a layout needs at least one shard, not {self.num_shards}; pass the "
                "size of the shard group"
            )
        names = [slot.name for slot in self.slots]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"parameters named twice in one layout: {twice}; give each parameter one name"
            )

    @classmethod
    def build(
        cls,
        named_shapes: Sequence[tuple[str, Sequence[int]]],
        num_shards: int,
        boxes: Mapping[str, Box | None] = MappingProxyType({}),
        itemsize: int = 4,
    ) -> FlatLayout:
        """Lay ``named_shapes`` out in the order given; ``boxes`` by name for parts of cut tensors,
        ``itemsize``: bytes of an element.

        A shape ``()`` holds one element, an empty one none.
        """
        slots, offset = [], 0
        for name, shape in named_shapes:
            sizes = tuple(map(int, shape))
            offset = _round_up(offset, _alignment(sizes, itemsize))
            slots.append(Slot(name, sizes, offset, boxes.get(name)))
            offset += math.prod(sizes)
        return cls(tuple(slots), num_shards)

    @cached_property
    def numel(self) -> int:
        """Number of elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def end(self) -> int:
        """Number of elements of the flat buffer without the padding after the last parameter."""
        return self.slots[-1].end if self.slots else 0

    @cached_property
    def padded(self) -> int:
        """Number of elements of the flat buffer."""
        large = any(slot.numel >= LARGE for slot in self.slots)
        return _round_up(self.end, self.num_shards * (BLOCK if large else ALIGNMENT))

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the flat buffer that hold no parameter, in order."""
        ends = [0, *[slot.end for slot in self.slots]]
        starts = [*[slot.offset for slot in self.slots], self.padded]
        return tuple((end, start) for end, start in zip(ends, starts) if end < start)

    @property
    def edges(self) -> list[int]:
        """The first elements of parameters and of the padding behind them."""
        return sorted({start for slot in self.slots for start in (slot.offset, slot.end)})

    def padding_in(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of padding inside ``[start, stop)``, counted from ``start``."""
        for first, last in self.padding:
            if first < stop and last > start:
                yield max(first, start) - start, min(last, stop) - start

    @property
    def shard_numel(self) -> int:
        """Number of elements of one shard."""
        return self.padded // self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """Return the half-open range of shard ``index`` in the flat buffer; it may have padding."""
        if not 0 <= index < self.num_shards:
            raise IndexError(
                f"shard {index} of a layout with {self.num_shards} shards; shards count from 0"
            )
        return index * self.shard_numel, (index + 1) * self.shard_numel

    @cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    @cached_property
    def by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    def pieces(self, start: int, stop: int) -> Iterator[ParameterRange]:
        """Yield the runs of parameters inside ``[start, stop)`` of the flat buffer, in order;
        padding yields nothing.
        """
        for slot in self._slots_in(start, stop):
            a, b = max(slot.offset, start), min(slot.end, stop)
            if a < b:
                yield ParameterRange(slot.name, a - slot.offset, b - slot.offset, a)

    def _slots_in(self, start: int, stop: int) -> Sequence[Slot]:
        """Return the slots in ``[start, stop)``; the first may end before, and some are empty."""
        # Of the slots that share an offset all but the last are empty, and those before them end at
        # or before it.
        first = max(0, bisect.bisect_right(self._offsets, start) - 1)
        return self.slots[first : bisect.bisect_left(self._offsets, stop)]

    def parameters_in(self, start: int, stop: int) -> list[tuple[str, int]]:
        """Return (parameter, its first element in the flat buffer) of each parameter with elements
        in ``[start, stop)``, in order. A range of padding only belongs to the last parameter.
        """
        parameters = [
            (slot.name, max(slot.offset, start))
            for slot in self._slots_in(start, stop)
            if max(slot.offset, start) < min(slot.end, stop)
        ]
        if not parameters and start < stop and self.slots:
            parameters = [(self.slots[-1].name, start)]
        return parameters

    def to_json(self) -> JsonObject:
        return {
            "shards": self.num_shards,
            "slots": [
                {"name": s.name, "shape": list(s.shape), "offset": s.offset}
                | ({} if s.box is None else {"box": s.box.to_json()})
                for s in self.slots
            ],
        }

    @classmethod
    def from_json(cls, data: JsonObject, adjacent: bool = False) -> FlatLayout:
        """Inverse of :meth:`to_json`.

        Raises ValueError if a field is missing or of another type, or slots overlap or, where they
        must be ``adjacent``, leave elements between them.
        """
        try:
            slots = tuple(
                Slot(
                    _typed(s["name"], str),
                    tuple(map(_count, s["shape"])),
                    _count(s["offset"]),
                    Box.from_json(s["box"]) if "box" in s else None,
                )
                for s in data["slots"]
            )
            num_shards = _count(data["shards"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                "a layout holds a list of slots (name, shape, offset) and a number "
                f"of shards: {error!r}"
            ) from None
        at = 0
        for slot in slots:
            wrong = slot.offset != at if adjacent else slot.offset < at
            if any(n < 0 for n in slot.shape) or wrong:
                raise ValueError(
                    f"slot {slot.name!r} with shape {slot.shape} stands at {slot.offset}, expected "
                    f"{at}{'' if adjacent else ' or more'}; the layout is damaged"
                )
            if slot.box is not None and slot.box.shape != slot.shape:
                raise ValueError(
                    f"slot {slot.name!r} has shape {slot.shape}, its box {slot.box.shape}; the "
                    "layout is damaged"
                )
            at = slot.end
        return cls(slots, num_shards)


def _alignment(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the number of elements of which the offset of a slot of ``shape`` is a multiple."""
    numel = math.prod(shape)
    if numel >= LARGE:
        return BLOCK
    return MATRIX_ALIGNMENT // itemsize if len(shape) > 1 and numel else 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _count(value: object) -> int:
    return _typed(value, int)
