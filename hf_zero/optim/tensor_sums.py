"""Sums over whole tensors whose parts lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.ops.flat_tiles import upload
from hf_zero.optim.table import Flat, Segment
from hf_zero.optim.whole_tensor import Tensors, WholeTensorOptimizer

# a tensor of fp64 added up over the ranks that share the flats
Reduce = Callable[[Tensor], Tensor]


class ShardedTensors(Tensors):
    """The tensors that ``optimizer`` steps: those of ``flats``, of which each segment is a part of
    one.

    ``segments`` gives those there are now, ``reduce`` is collective, ``kernels`` the
    configuration's.
    """

    def __init__(
        self,
        optimizer: WholeTensorOptimizer,
        flats: Iterable[Flat],
        group_of: Mapping[str, int],
        segments: Callable[[], Iterable[Segment]],
        reduce: Reduce,
        kernels: Any,
    ) -> None:
        self.kernels = kernels
        self._optimizer = optimizer
        self._segments, self._reduce = segments, reduce
        self._shapes = {
            slot.name: tuple(slot.shape) for flat in flats for slot in flat.layout.slots
        }
        by_group: list[list[str]] = [[] for _ in optimizer.param_groups]
        for name in self._shapes:
            if name in group_of:
                by_group[group_of[name]].append(name)
        names = [name for of in by_group for name in of]
        self._sizes = [len(of) for of in by_group]
        self._rows = {name: row for row, name in enumerate(names)}
        # of each tensor, in the last step that has updated it; and a row for stand-ins
        self._last = torch.zeros(len(names) + 1, optimizer.SUMS, dtype=torch.float64)
        optimizer.tensors = self

    def shapes(self, parts: Sequence[Sequence[Tensor]]) -> list[list[tuple[int, ...]]]:
        names = dict(self._names())
        own = {part: self._shapes[name] for part, name in names.items()}
        return [[own.get(part, (1,)) for part in of] for of in parts]

    def shape_of(self, segment: Segment) -> tuple[int, ...]:
        """The shape of the tensor that ``segment`` is a part of."""
        return self._shapes[min(segment.names)]

    def totals(
        self, parts: Sequence[Sequence[Tensor]], sums: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        names = dict(self._names())
        found = self._total([self._row(names.get(part)) for of in parts for part in of], sums)
        return found, self._by_group()

    def totals_of(self, measured: Mapping[Segment, Tensor]) -> dict[Segment, Tensor]:
        """The sums [k] of each segment, added up over all parts of its tensor (collective)."""
        sums = torch.zeros(0, self._optimizer.SUMS, dtype=torch.float64)
        if measured:
            sums = torch.stack(list(measured.values()))
        found = self._total([self._row(min(segment.names)) for segment in measured], sums)
        self._optimizer.norms = [each.sqrt() for each in self._by_group()]
        return dict(zip(measured, found))

    def _by_group(self) -> list[Tensor]:
        return list(self._last[:-1].split(self._sizes))

    def _names(self) -> Iterable[tuple[Tensor, str]]:
        return (
            (segment.tensor, min(segment.names)) for segment in self._segments() if segment.parts
        )

    def _row(self, name: str | None) -> int:
        """The row of a tensor; the last one is that of stand-ins."""
        return len(self._rows) if name is None else self._rows[name]

    def _total(self, rows: Sequence[int], sums: Tensor) -> Tensor:
        places = upload(torch.tensor(rows, dtype=torch.long), sums.device)
        own = sums.new_zeros(self._last.shape).index_add_(0, places, sums)
        every = self._reduce(own).to(sums.device)
        updated = every.any(dim=1, keepdim=True)
        self._last = torch.where(updated, every, self._last.to(every.device))
        return every[places]
