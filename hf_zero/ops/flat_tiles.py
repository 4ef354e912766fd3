"""The positions of an update's elements: segments of flat buffers cut into tiles, and the tables of
them that a kernel reads.

A table has one row of :data:`COLUMNS` int64 for each tile: the places of its first element in the
master, the gradient, the moments and the copy, its length, the row of its settings, and whether it
is whole: it has ``tile`` elements and starts at a multiple of :data:`PHASE` in each buffer, so that
16-byte accesses need no masks. Tiles never cross the end of a segment.

Sums of squares of many tensors are taken in one pass: fp32 in runs of :data:`RUN` elements, runs
added in fp64, in a fixed order. The result of a tensor depends on its elements alone, not on its
neighbors. A run whose fp32 sum overflows, or is so small that squares may have vanished, is summed
again in fp64; so a sum is not finite exactly if an element is not.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.device import graphs
from hf_zero.device.pinned import upload
from hf_zero.errors import KernelError
from hf_zero.ops.dispatch import Kernel

PHASE = 8  # elements: 16 bytes of the narrowest dtype
COLUMNS = 8
# lr, weight decay, beta1, beta2, eps, log(beta1), log(beta2), sign of the gradient, decoupled
SETTINGS = 9
# sign, keep, l2, beta1, 1 - beta1, beta2, 1 - beta2, step size of Adam, 1 / sqrt(1 - beta2^step),
# eps, lr; then zeros
COEFFICIENTS = 16
TILE = 4096


@dataclass(frozen=True)
class FlatRun:
    """``length`` elements of one segment: the index of the first one in each buffer, and the row of
    their settings.

    ``out`` None: there is no copy.
    """

    length: int
    row: int
    master: int
    grad: int
    moment: int
    out: int | None = None

    def joins(self, other: FlatRun) -> bool:
        """Return whether ``other`` continues this run in every buffer."""
        return self.row == other.row and all(
            b == a + self.length for a, b in zip(self.places, other.places)
        )

    @property
    def places(self) -> tuple[int, int, int, int]:
        """The places in the master, the gradient, the moments and the copy; without a copy, the
        place in the master is repeated.
        """
        return self.master, self.grad, self.moment, self.master if self.out is None else self.out


@dataclass(frozen=True, eq=False)
class Tiles:
    """The table of an update, [tiles, COLUMNS] int64 on its device, and the sizes that it needs."""

    table: Tensor
    tile: int
    rows: int
    extents: tuple[int, int, int, int]  # least elements of master, gradient, moments and copy

    @classmethod
    def cut(cls, pieces: Iterable[FlatRun], device: torch.device | str, tile: int = TILE) -> Tiles:
        """Cut ``pieces``, which share no element, into tiles. Pieces that continue each other in
        every buffer are joined first.

        Raises KernelError for a tile that is no power of two of at least 16, or a piece that begins
        before its buffer.
        """
        if tile < 16 or tile & (tile - 1):
            raise KernelError(
                f"Tiles: a tile of {tile} elements; give a power of two of at "
                f"least 16, such as {TILE}"
            )
        joined = _joined(pieces)
        for piece in joined:
            if min(piece.length, piece.row, *piece.places) < 0:
                raise KernelError(
                    f"Tiles: {piece} has a negative length, row or place; all of them count from 0"
                )
        with torch.device("cpu"):  # whatever the default device is
            tables = [_cut(piece, tile) for piece in joined]
            table = torch.cat([torch.empty(0, COLUMNS, dtype=torch.int64), *tables])
        ends = [tuple(start + piece.length for start in piece.places) for piece in joined]
        extents = tuple(max(places) for places in zip(*ends)) if ends else (0, 0, 0, 0)
        return cls(
            upload(table, device),
            tile,
            max((piece.row + 1 for piece in joined), default=0),
            extents,
        )  # type: ignore[arg-type]


def _joined(pieces: Iterable[FlatRun]) -> Sequence[FlatRun]:
    joined: list[FlatRun] = []
    for piece in pieces:
        if piece.length == 0:
            continue
        if joined and joined[-1].joins(piece):
            last = joined[-1]
            piece = FlatRun(
                last.length + piece.length, last.row, last.master, last.grad, last.moment, last.out
            )
            joined.pop()
        joined.append(piece)
    return joined


def _cut(piece: FlatRun, tile: int) -> Tensor:
    even = len({start % PHASE for start in piece.places}) == 1
    lead = min(-piece.master % PHASE, piece.length) if even else 0
    starts = torch.arange(lead, piece.length, tile, dtype=torch.int64)
    if lead:
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), starts])
    ends = torch.cat([starts[1:], torch.tensor([piece.length])])
    table = torch.zeros(starts.numel(), COLUMNS, dtype=torch.int64)
    for column, offset in enumerate(piece.places):
        table[:, column] = starts + offset
    table[:, 4] = ends - starts
    table[:, 5] = piece.row
    if even:
        table[:, 6] = (ends - starts == tile) & (starts % PHASE == lead % PHASE)
    return table


RUN = 16384
RUN_COLUMNS = 4  # first element, length, whether it is whole and aligned, 0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _example(device: torch.device) -> tuple[object, ...]:
    return torch.rand(40, device=device), *run_tables(((0, 24), (24, 16)), device)


def run_squares(base: Tensor, runs: Tensor, bounds: Tensor) -> Tensor:
    """Return the sums of squares in plain torch, [ranges] fp64, of ranges of ``base``, whose runs
    are ``runs[bounds[i] : bounds[i + 1]]``.
    """
    table, at = runs.tolist(), bounds.tolist()
    sums = torch.zeros(len(at) - 1, dtype=torch.float64, device=base.device)
    for index, (first, last) in enumerate(itertools.pairwise(at)):
        for start, length, _, _ in table[first:last]:
            sums[index] += base[start : start + length].double().square().sum()
    return sums


RUNS = Kernel("flat_squares", "flat_norm:squares", run_squares, example=_example)


def range_sums(values: Tensor, bounds: Tensor) -> Tensor:
    """Return the sums in plain torch, [ranges] fp64, of the ranges ``values[bounds[i] : bounds[i +
    1]]`` of ``values``, fp64.
    """
    ranges = itertools.pairwise(bounds.tolist())
    return torch.stack([values[first:last].sum() for first, last in ranges])


SUMS = Kernel(
    "flat_sums",
    "flat_norm:sums",
    range_sums,
    example=lambda device: (
        torch.rand(9, dtype=torch.float64, device=device),
        torch.tensor([0, 4, 9], device=device),
    ),
)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each of ``tensors``: [tensors] fp64, on their device.

    Args:
        tensors: contiguous, fp32, bf16 or fp16, on one device. Those of one dtype in one storage
            take one launch.

    Raises:
        KernelError: no tensors, or a tensor of another kind.
    """
    if not tensors:
        raise KernelError(
            "squared_norms: there are no tensors, and so no device for the "
            "result; give at least one"
        )
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in _DTYPES:
            raise KernelError(
                f"squared_norms: tensor {index} is {tensor.dtype}; give one of "
                f"{', '.join(map(str, _DTYPES))}"
            )
        if not tensor.is_contiguous():
            raise KernelError(
                f"squared_norms: tensor {index} has strides {tensor.stride()}; make it contiguous"
            )
        if tensor.device != tensors[0].device:
            raise KernelError(
                f"squared_norms: tensor {index} is on {tensor.device} and tensor 0 on "
                f"{tensors[0].device}; move it there"
            )
    return torch.ops.hf_zero.flat_squared_norms(list(tensors))


@torch.library.custom_op("hf_zero::flat_squared_norms", mutates_args=())
def _squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    together: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        together[tensor.untyped_storage()._cdata, tensor.dtype].append(index)
    sums = []
    order = []
    for indices in together.values():
        first = tensors[indices[0]]
        base = first.detach().as_strided(
            (first.untyped_storage().nbytes() // first.element_size(),), (1,), 0
        )
        places = tuple(
            (tensors[index].storage_offset(), tensors[index].numel()) for index in indices
        )
        tables = run_tables(places, first.device)
        graphs.hold(*tables)
        sums.append(RUNS(base, *tables))
        order += indices
    whole = torch.cat(sums)
    if order == list(range(len(order))):
        return whole
    return torch.stack(
        [part for _, part in sorted(zip(order, whole.unbind()), key=lambda pair: pair[0])]
    )


@_squared_norms.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device)


@functools.lru_cache(maxsize=64)
def run_tables(places: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the runs [runs, RUN_COLUMNS] of ranges (first element, length) of one buffer, and the
    index of the first run of each range [ranges + 1].
    """
    with torch.device("cpu"):  # whatever the default device is
        tables, bounds = [torch.empty(0, RUN_COLUMNS, dtype=torch.int64)], [0]
        for offset, length in places:
            starts = torch.arange(0, length, RUN, dtype=torch.int64)
            table = torch.zeros(starts.numel(), RUN_COLUMNS, dtype=torch.int64)
            table[:, 0] = starts + offset
            table[:, 1] = (length - starts).clamp(max=RUN)
            table[:, 2] = (table[:, 1] == RUN) & (offset % PHASE == 0)
            tables.append(table)
            bounds.append(bounds[-1] + starts.numel())
        run_bounds = torch.tensor(bounds, dtype=torch.int64)
    return upload(torch.cat(tables), device), upload(run_bounds, device)
