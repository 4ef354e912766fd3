"""Momenta in one bit an element and one scale a block, as the 1-bit optimizers send them (Tang et
al. 2021, arXiv:2102.02888), with error feedback.

C(z) of a block is s * sign(z); the sign of zero is positive. s is the root mean square of z as in
the paper, but at most twice the mean of |z|: so |z - C(z)| is at most |z| in every block, even if
few elements are large. Every tensor begins a new block, as does every chunk: no scale is shared by
two tensors. Padding behind the last tensor is in no block, and never read or changed.

A message is a row of bytes for one rank's chunk: bits (element k of block j is bit k % 8 of byte (j
* block + k) / 8, 1 if it is not negative), then scales (fp32), both at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.errors import KernelError
from hf_zero.ops import native
from hf_zero.ops import sign_blocks_reference as reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.native import FLOATS, FP32, address, kind, rows_of_bytes

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
ALIGNMENT = 16  # bytes; bits and scales of a message begin at multiples of it
PIECE = 1 << 22  # elements that are squared at once


@dataclass(frozen=True)
class SignBlocks:
    """The form of messages: ``block`` elements of a tensor share a scale."""

    block: int = 2048

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise KernelError(
                f"SignBlocks({self.block}): there are blocks of {', '.join(map(str, BLOCKS))}"
            )

    def cut(self, starts: Sequence[int], numel: int, rows: int, chunk: int) -> BlockTable:
        """Return the blocks of a buffer of ``rows`` chunks of ``chunk`` elements. Its tensors begin
        at ``starts``, each at the end of the previous one, and so does the padding between them,
        which is zero; elements from ``numel`` on are padding without blocks.
        """
        parts: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        edges = {*starts, *(row * chunk for row in range(rows + 1)), numel}
        for start, stop in pairwise(sorted(edges)):
            if start < numel:
                parts[start // chunk].append((start % chunk, stop - start))
        count = max(sum(-(-size // self.block) for _, size in row) for row in parts)
        return BlockTable(self.block, chunk, max(1, count), tuple(map(tuple, parts)))


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of a buffer of equal chunks, and its messages: a row for each chunk.

    count: blocks of a message; in a row with fewer the last are empty. parts: of each row, in
    order, the first element and the length of each tensor in the chunk.
    """

    block: int
    chunk: int
    count: int
    parts: tuple[tuple[tuple[int, int], ...], ...]
    _copies: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of blocks in each."""
        return self.rows, self.count

    def row(self, index: int) -> BlockTable:
        """Return the blocks of one chunk."""
        return BlockTable(self.block, self.chunk, self.count, self.parts[index : index + 1])

    @cached_property
    def edges(self) -> Tensor:
        """The first elements of blocks in their chunks, and the end of the last: int64 [rows, count
        + 1] in host memory.
        """
        bounds = torch.empty(self.rows, self.count + 1, dtype=torch.int64, device="cpu")
        for edges, parts in zip(bounds, self.parts):
            edges.fill_(sum(size for _, size in parts))
            block = 0
            for at, size in parts:
                count = -(-size // self.block)
                torch.arange(at, at + size, self.block, out=edges[block : block + count])
                block += count
        return bounds

    @cached_property
    def bounds(self) -> Tensor:
        """The first elements of blocks in the buffer, row by row, and the end of the last: int64
        [rows * count + 1].
        """
        sizes = self.edges.diff().view(-1)
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))

    @property
    def scales_at(self) -> int:
        """The byte of a message at which the scales begin."""
        return -(-self.count * self.block // (8 * ALIGNMENT)) * ALIGNMENT

    @property
    def nbytes(self) -> int:
        """The bytes of a message."""
        return self.scales_at + -(-4 * self.count // ALIGNMENT) * ALIGNMENT

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a message for each row: zeros."""
        return torch.zeros(self.rows, self.nbytes, dtype=torch.uint8, device=device)

    def compress(
        self, error: Tensor, grad: Tensor, momentum: Tensor, beta: float, factor: Tensor
    ) -> Tensor:
        """Return a message for each rank: C(z) of z = error + beta * m + factor * grad, where m is
        the decoded ``momentum``. ``error`` becomes z - C(z).

        Args:
            error: fp32 [rows * chunk].
            grad: fp32, bf16 or fp16, of the size of ``error``.
            momentum: uint8 [rows, nbytes]; so is the result.
            factor: fp32, 0-dim.
        """
        self._check("compress", momentum, error=(error, FP32), grad=(grad, FLOATS))
        out = torch.zeros_like(momentum)
        core = native.core() if error.device.type == "cpu" else None
        if core is None:
            COMPRESS(out, momentum, error, grad, beta, factor, *self._form(error.device))
            return out
        for row, block, at, size in self._pieces():
            core.sign_compress(
                self._part(core, out, row, block, size),
                self._part(core, momentum, row, block, size),
                address(error) + at * error.itemsize,
                address(grad) + at * grad.itemsize,
                kind(grad),
                beta,
                float(factor),
                size,
            )
        return out

    def combine(self, came: Tensor, average: Tensor, momentum: Tensor, beta: float) -> Tensor:
        """Return the owner's message, for a table of one row: C(r), uint8 [1, nbytes], of r = mean
        of ``came`` + beta * (average - m), where m is the decoded ``momentum``. ``average`` becomes
        C(r) + (r - C(r)) / beta.

        Args:
            came: uint8 [ranks, nbytes], added up in the order of the rows.
            average: fp32 [chunk].
            momentum: uint8 [1, nbytes].
        """
        self._check("combine", momentum, average=(average, FP32))
        self._check_rows("combine", came)
        out = torch.zeros_like(momentum)
        core = native.core() if average.device.type == "cpu" else None
        if core is None:
            COMBINE(out, came, momentum, average, beta, *self._form(average.device))
            return out
        for row, block, at, size in self._pieces():
            core.sign_combine(
                self._part(core, out, row, block, size),
                self._part(core, came, row, block, size, came.shape[0]),
                self._part(core, momentum, row, block, size),
                address(average) + at * average.itemsize,
                beta,
                size,
            )
        return out

    def apply(
        self, weights: Tensor, momentum: Tensor, exponents: Tensor, keep: Tensor, step: Tensor
    ) -> None:
        """Compute weights = keep * weights - step * m * 2^(-exponents / 4), with the powers rounded
        (see ``powers`` of the reference), where m is the decoded ``momentum``.

        Args:
            weights: fp32 [rows * chunk].
            momentum: uint8 [rows, nbytes].
            exponents: int8, of the size of ``weights``.
            keep, step: of each block, equal within a tensor: fp32 [rows, count].
        """
        self._check("apply", momentum, weights=(weights, FP32), exponents=(exponents, _INT8))
        for name, numbers in (("keep", keep), ("step", step)):
            if numbers.shape != self.shape or numbers.dtype != torch.float32:
                raise KernelError(
                    f"apply: {name} is {numbers.dtype} of shape {tuple(numbers.shape)}; give one "
                    f"fp32 number for each block, {self.shape}"
                )
        core = native.core() if weights.device.type == "cpu" else None
        if core is None:
            keep, step = keep.contiguous(), step.contiguous()
            APPLY(weights, momentum, exponents, keep, step, *self._form(weights.device))
            return
        keeps, steps = keep.tolist(), step.tolist()
        for row, block, at, size in self._pieces():
            core.sign_apply(
                self._part(core, momentum, row, block, size),
                address(weights) + at * weights.itemsize,
                address(exponents) + at,
                keeps[row][block],
                steps[row][block],
                0,
                size,
            )

    def means(self, values: Callable[[int, int], Tensor]) -> Tensor:
        """Return the mean in each block, zero in an empty one: [rows, count]. ``values`` returns
        the elements [start, stop), a piece at a time: all of them in fp64 would take 8 bytes a
        weight.
        """
        some, means = max(1, PIECE // self.block), []
        for first in range(0, self.rows * self.count, some):
            bounds = self.bounds[first : first + some + 1]
            part = values(int(bounds[0]), int(bounds[-1]))
            sizes = self._edges_on(part.device).diff().view(-1)[first : first + some]
            sums = part.new_zeros(len(sizes))
            if part.numel():
                sums = torch.segment_reduce(part, "sum", lengths=sizes, unsafe=True)
            means.append(sums / sizes.clamp(min=1))
        return torch.cat(means).view(self.shape)

    def mean_squares(self, exponents: Tensor) -> Tensor:
        """Return the mean square of the values of ``exponents``, int8 [rows * chunk], in each
        block: fp64 [rows, count].
        """
        return self.means(
            lambda start, stop: reference.powers(exponents[start:stop]).double().square_()
        )

    def numbers(self, starts: Sequence[int]) -> Tensor:
        """Return for each block the index of the last of ``starts`` that is not behind it: int64
        [rows * count].
        """
        at = torch.searchsorted(torch.tensor(starts, device="cpu"), self.bounds[:-1], right=True)
        return at.sub_(1).clamp_(min=0)

    def scales(self, messages: Tensor) -> Tensor:
        """Return the scales of ``messages``: fp32 [rows, count], a view."""
        at = self.scales_at
        return messages[:, at : at + 4 * self.count].view(torch.float32)

    def values(self, messages: Tensor) -> Tensor:
        """Decode ``messages``: fp32 [rows * chunk], zeros in the padding."""
        decoded = torch.zeros(self.rows * self.chunk, dtype=torch.float32, device=messages.device)
        ones = torch.ones(self.shape, dtype=torch.float32, device=messages.device)
        nothing = torch.zeros(decoded.numel(), dtype=torch.int8, device=messages.device)
        self.apply(decoded, messages, nothing, ones, -ones)
        return decoded

    def spread(self, numbers: Tensor) -> Tensor:
        """Give each element the number of its block, from ``numbers`` [rows, count], none negative:
        fp32 [rows * chunk], zeros in the padding.
        """
        messages = self.empty(numbers.device).fill_(255)
        self.scales(messages).copy_(numbers)
        return self.values(messages)

    @cached_property
    def _align(self) -> int:
        """A common divisor of all edges, for loads of that many elements at once."""
        whole = all((at | size) % 8 == 0 for parts in self.parts for at, size in parts)
        return 8 if whole else 1

    def _edges_on(self, device: torch.device) -> Tensor:
        edges = self._copies.get(device)
        if edges is None:
            edges = self._copies[device] = upload(self.edges, device)
        return edges

    def _form(self, device: torch.device) -> tuple[Tensor, int, int, int]:
        return self._edges_on(device), self._align, self.block, self.scales_at

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the parts of tensors: the row, their first block, their place in the buffer, and
        the number of elements.
        """
        for row, parts in enumerate(self.parts):
            block = 0
            for at, size in parts:
                yield row, block, row * self.chunk + at, size
                block += -(-size // self.block)

    def _part(
        self, core: Any, messages: Tensor, row: int, block: int, numel: int, rows: int = 1
    ) -> object:
        """Return a view for the native core: ``numel`` elements of each of ``rows`` messages,
        starting at ``block``.
        """
        first = address(messages) + row * messages.shape[1]
        scales, bits = first + self.scales_at + 4 * block, first + block * self.block // 8
        return core.Rows(scales, bits, messages.shape[1], 1, self.block, rows, numel)

    def _check(
        self, op: str, messages: Tensor, **values: tuple[Tensor, tuple[torch.dtype, ...]]
    ) -> None:
        numel = self.rows * self.chunk
        for name, (tensor, dtypes) in values.items():
            if tensor.dtype not in dtypes or tensor.shape != (numel,) or not tensor.is_contiguous():
                raise KernelError(
                    f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give {numel} "
                    f"contiguous elements of one of {', '.join(map(str, dtypes))}"
                )
        self._check_rows(op, messages)
        if len(messages) != self.rows:
            raise KernelError(
                f"{op}: {len(messages)} messages for {self.rows} chunks; give one for each"
            )

    def _check_rows(self, op: str, messages: Tensor) -> None:
        content = f"{self.count} blocks of {self.block} elements in 1 bit"
        rows_of_bytes(op, messages, self.nbytes, content)


_INT8 = (torch.int8,)
# two rows of 40 elements, of which five are padding; the second tensor begins at 27
_EXAMPLE = SignBlocks(32).cut((0, 27), 75, 2, 40)


def _message(table: BlockTable, device: torch.device) -> Tensor:
    out = table.empty(device).fill_(0x5A)
    table.scales(out).fill_(0.5)
    return out


def _compress_example(device: torch.device) -> tuple[object, ...]:
    message, values = _message(_EXAMPLE, device), torch.linspace(-1, 1, 80, device=device)
    factor = torch.full((), 0.1, device=device)
    form = _EXAMPLE._form(device)
    return torch.zeros_like(message), message, values, values.clone(), 0.9, factor, *form


def _combine_example(device: torch.device) -> tuple[object, ...]:
    table, values = _EXAMPLE.row(1), torch.linspace(-1, 1, 40, device=device)
    message, came = _message(table, device), _message(_EXAMPLE, device)
    return torch.zeros_like(message), came, message, values, 0.9, *table._form(device)


def _apply_example(device: torch.device) -> tuple[object, ...]:
    weights = torch.linspace(-1, 1, 80, device=device)
    exponents = torch.arange(80, device=device).sub(40).to(torch.int8)
    keep = torch.full((2, _EXAMPLE.count), 0.99, device=device)
    message, form = _message(_EXAMPLE, device), _EXAMPLE._form(device)
    return weights, message, exponents, keep, keep * 0.01, *form


_MODULE = "sign_blocks"  # of the Triton kernels
COMPRESS = Kernel(
    "sign_compress", f"{_MODULE}:compress", reference.compress, example=_compress_example
)
COMBINE = Kernel("sign_combine", f"{_MODULE}:combine", reference.combine, example=_combine_example)
APPLY = Kernel("sign_apply", f"{_MODULE}:apply", reference.apply, example=_apply_example)
