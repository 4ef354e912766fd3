"""Whole tensors whose parts are on several ranks: sums over them, and updates of whole matrices.

[Note: assignment of matrices to ranks]
A matrix is computed by one of the ranks that hold a part of it, so that parts are sent to one rank
and the update back: one all-to-all each way. The matrices are assigned once, the costliest first,
each to that one of its ranks with the least work so far; every rank computes the same assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.optim.segments import Segment
from hf_zero.optim.whole_tensor import ShardRanks, TensorPlace, Tensors, WholeTensorOptimizer

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard


class ShardedTensors(Tensors):
    """The tensors in ``flats`` that ``optimizer`` steps; each segment is a part of one.

    ``segments`` returns the current segments; ``kernels`` is the configuration's.
    """

    def __init__(
        self,
        optimizer: WholeTensorOptimizer,
        flats: Iterable[OptimizerShard],
        group_of: Mapping[str, int],
        segments: Callable[[], Iterable[Segment]],
        ranks: ShardRanks,
        kernels: str | tuple[str, ...],
    ) -> None:
        self.kernels = kernels
        self.optimizer = optimizer
        self._group_of, self._segments, self._ranks = group_of, segments, ranks
        layouts = [flat.layout for flat in flats]
        self._places = {slot.name: (layout, slot) for layout in layouts for slot in layout.slots}
        self._shapes = {name: tuple(slot.shape) for name, (_, slot) in self._places.items()}
        by_group: list[list[str]] = [[] for _ in optimizer.param_groups]
        for name in self._shapes:
            if name in group_of:
                by_group[group_of[name]].append(name)
        names = [name for of in by_group for name in of]
        self._sizes = [len(of) for of in by_group]
        self._rows = {name: row for row, name in enumerate(names)}
        self._sizes_of: dict[str, list[int]] = {}
        self._sums: int = getattr(optimizer, "SUMS", 0)
        # the sums of each tensor in the last step that updated it, and a row for stand-ins
        self._last = torch.zeros(len(names) + 1, self._sums, dtype=torch.float64)

    def places(self, parts: Sequence[Sequence[Tensor]]) -> list[list[TensorPlace]]:
        place_of = {s.tensor: self.place_of(s) for s in self._segments() if s.parts}
        return [[place_of.get(part, TensorPlace((1,), 0, 1)) for part in of] for of in parts]

    def place_of(self, segment: Segment) -> TensorPlace:
        """Return the place of ``segment`` in its tensor."""
        return TensorPlace(self._shapes[min(segment.names)], *segment.extent)

    def totals(
        self, parts: Sequence[Sequence[Tensor]], sums: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        names = dict(self._names())
        totals = self._total([self._row(names.get(part)) for of in parts for part in of], sums)
        return totals, self._by_group()

    def summed(
        self,
        parts: Sequence[Tensor],
        sums: Sequence[Tensor],
        length: Callable[[tuple[int, ...]], int],
    ) -> list[Tensor]:
        lengths = [length(self._shapes[name]) for name in self._rows]
        names = dict(self._names())
        rows = [names.get(part) for part in parts]
        local_sums = torch.zeros(sum(lengths), dtype=torch.float64, device=device_of(sums))
        sums_by_name = dict(zip(self._rows, local_sums.split(lengths)))
        for name, v in zip(rows, sums):
            if name is not None:
                sums_by_name[name] += v.to(local_sums.device)
        every = self._ranks.add_up(local_sums).to(local_sums.device)
        totals = dict(zip(self._rows, every.split(lengths)))
        return [v if name is None else totals[name].to(v.device) for name, v in zip(rows, sums)]

    def transformed(
        self,
        parts: Sequence[Tensor],
        values: Sequence[Tensor],
        transform: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        index_of = {part: index for index, part in enumerate(parts)}
        # (name, first element, offset in the segment, elements, index into the values); padding,
        # which belongs to no tensor, may follow
        pieces = sorted(
            (name, start, at, stop - start, index_of[segment.tensor])
            for segment in self._segments()
            if segment.tensor in index_of
            for part in segment.parts
            for name, start, stop, at in part.pieces()
        )
        rank, size = self._ranks.rank, self._ranks.size
        names = list(dict.fromkeys(name for name, *_ in pieces))
        mine = [name for name in names if self._owners[name] == rank]

        rows = list[list[Tensor]]([] for _ in range(size))
        for name, _, at, length, index in pieces:
            rows[self._owners[name]].append(values[index][at : at + length])
        counts_by_name = [self._held(name) for name in mine]
        counts = [sum(of[peer] for of in counts_by_name) for peer in range(size)]
        came = self._exchange(rows, counts)
        received_parts = [
            part.split([of[peer] for of in counts_by_name]) for peer, part in enumerate(came)
        ]
        back = list[list[Tensor]]([] for _ in range(size))
        for at, name in enumerate(mine):
            whole = torch.cat([part[at] for part in received_parts]).view(self._shapes[name])
            update = transform(whole).reshape(-1)
            for peer, part in enumerate(update.split(counts_by_name[at])):
                back[peer].append(part)
        received = self._exchange(back, [sum(map(torch.numel, of)) for of in rows])

        remaining = [iter(part.split([*map(torch.numel, of)])) for part, of in zip(received, rows)]
        updates = [torch.zeros_like(value) for value in values]
        for name, _, at, length, index in pieces:
            updates[index][at : at + length] = next(remaining[self._owners[name]])
        return updates

    def _exchange(
        self, rows: Sequence[Sequence[Tensor]], counts: Sequence[int]
    ) -> Sequence[Tensor]:
        """Send ``rows[rank]``, bf16, joined, to each rank; receive ``counts[rank]`` elements."""
        pieces = [piece for of in rows for piece in of]
        none = torch.zeros(0, dtype=torch.bfloat16, device=device_of(pieces))
        sizes = [sum(map(torch.numel, of)) for of in rows]
        return self._ranks.exchange(torch.cat([none, *pieces]), sizes, counts)

    def _held(self, name: str) -> list[int]:
        """Return the number of elements of a tensor that each rank holds."""
        if name not in self._sizes_of:
            layout, slot = self._places[name]
            ranges = [layout.shard_range(rank) for rank in range(self._ranks.size)]
            if self._ranks.size == 1:
                ranges = [(slot.offset, slot.end)]
            self._sizes_of[name] = [
                max(0, min(slot.end, stop) - max(slot.offset, start)) for start, stop in ranges
            ]
        return self._sizes_of[name]

    @cached_property
    def _owners(self) -> dict[str, int]:
        """The rank that computes each matrix (see the note)."""
        load = [0.0] * self._ranks.size
        owners: dict[str, int] = {}
        costs = {
            name: prod(self._shapes[name]) * min(self._shapes[name])
            for name, group in self._group_of.items()
            if self.optimizer.param_groups[group].get("use_muon") and name in self._shapes
        }
        for name in sorted(costs, key=lambda name: (-costs[name], name)):
            ranks = [rank for rank, numel in enumerate(self._held(name)) if numel]
            owners[name] = min(ranks, key=lambda rank: (load[rank], rank), default=0)
            load[owners[name]] += costs[name]
        return owners

    def _by_group(self) -> list[Tensor]:
        return list(self._last[:-1].split(self._sizes))

    def _names(self) -> Iterable[tuple[Tensor, str]]:
        return (
            (segment.tensor, min(segment.names)) for segment in self._segments() if segment.parts
        )

    def _row(self, name: str | None) -> int:
        """Return the row of a tensor; the last row is for stand-ins."""
        return len(self._rows) if name is None else self._rows[name]

    def _total(self, rows: Sequence[int], sums: Tensor) -> Tensor:
        indices = upload(torch.tensor(rows, dtype=torch.long), sums.device)
        local_sums = sums.new_zeros(self._last.shape).index_add_(0, indices, sums)
        every = self._ranks.add_up(local_sums).to(sums.device)
        updated = every.any(dim=1, keepdim=True)
        self._last = torch.where(updated, every, self._last.to(every.device))
        return every[indices]


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the first of ``tensors``, or the host if there is none."""
    return tensors[0].device if tensors else torch.device("cpu")
