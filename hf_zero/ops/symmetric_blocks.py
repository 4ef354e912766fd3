"""Numbers in blocks with one scale: 4 or 8 bits an element, as compressed collectives carry them.

The scale of a block is its largest magnitude over 7 (127 in 8 bits), rounded to bf16; the code of
an element is the nearest multiple of it, ties to even: the error is at most half a scale. A block
with a value that is not finite decodes to NaN throughout, so that a later overflow check finds it;
a block whose largest magnitude is below 2^-90 is zero. A code is a number in two's complement; of
four bits, a byte has two, the first in the lower half.

A message is a row of bytes: codes, then scales (bf16), both at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import native
from hf_zero.ops import symmetric_blocks_reference as reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.native import FLOATS, FP32, address, flat, kind, rows_of_bytes

BITS = (4, 8)
BLOCKS = (32, 64, 128, 256, 512, 1024)  # the largest is a tile of the kernels
ROW = 16  # bytes; parts of a message begin at multiples of it


@dataclass(frozen=True)
class SymmetricBlocks:
    """The form of a message: ``bits`` a code and ``block`` elements a scale."""

    bits: int
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.block not in BLOCKS:
            raise KernelError(
                f"SymmetricBlocks({self.bits}, {self.block}): there are codes of "
                f"{' and '.join(map(str, BITS))} bits, and blocks of {', '.join(map(str, BLOCKS))}"
            )

    def scales(self, numel: int) -> int:
        """Return the number of scales of ``numel`` elements."""
        return -(-numel // self.block)

    def scales_at(self, numel: int) -> int:
        """Return the byte of a message of ``numel`` elements at which the scales begin."""
        return -(-numel * self.bits // (8 * ROW)) * ROW

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self.scales_at(numel) + -(-2 * self.scales(numel) // ROW) * ROW

    def quantize(self, source: Tensor, rows: int = 1, minus: Tensor | None = None) -> Tensor:
        """Return a message for each of ``rows`` equal parts of ``source``: uint8 [rows, nbytes].

        Args:
            source: fp32, bf16 or fp16 [rows * n].
            minus: like ``source``, of any of its dtypes: the difference to it is quantized.
        """
        numel = self._check("quantize", "source", source, rows)
        if minus is not None:
            _fits("quantize", "minus", minus, source)
        out = torch.empty(rows, self.nbytes(numel), dtype=torch.uint8, device=source.device)
        core = native.core() if source.device.type == "cpu" else None
        if core is not None:
            core.quantize(
                self._rows(core, out, numel),
                address(source),
                kind(source),
                address(minus),
                kind(minus),
            )
        else:
            QUANTIZE(out, source, minus, self.bits, self.block, self.scales_at(numel))
        return out

    def dequantize(self, messages: Tensor, out: Tensor, add: bool = False) -> None:
        """Decode each row of ``messages``, [rows, nbytes], into ``out``, concatenated: fp32, bf16
        or fp16 [rows * n]. ``add``: add to the values of ``out``, in fp32.
        """
        rows = messages.shape[0]
        numel = self._check("dequantize", "out", out, rows)
        self._check_messages("dequantize", messages, numel)
        core = native.core() if out.device.type == "cpu" else None
        if core is not None:
            core.dequantize(self._rows(core, messages, numel), address(out), kind(out), add)
        else:
            DEQUANTIZE(out, messages, self.bits, self.block, self.scales_at(numel), add)

    def dequantize_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode and sum the rows of ``messages``, [rows, nbytes], in fp32 and in their order, into
        ``out``, fp32 [n].
        """
        numel = self._check("dequantize_sum", "out", out, 1)
        if out.dtype not in FP32:
            raise KernelError(f"dequantize_sum: out is {out.dtype}; sums are taken in fp32")
        self._check_messages("dequantize_sum", messages, numel)
        core = native.core() if out.device.type == "cpu" else None
        if core is not None:
            core.dequantize_sum(self._rows(core, messages, numel), address(out))
        else:
            DEQUANTIZE_SUM(out, messages, self.bits, self.block, self.scales_at(numel))

    def _rows(self, core: object, messages: Tensor, numel: int) -> object:
        codes = address(messages)
        return core.Rows(  # type: ignore[attr-defined]
            codes + self.scales_at(numel),
            codes,
            messages.shape[1],
            self.bits,
            self.block,
            messages.shape[0],
            numel,
        )

    def _check(self, op: str, name: str, values: Tensor, rows: int) -> int:
        """Return the elements of a row of ``values``; raise KernelError for unsupported ones."""
        if values.device.type == "cpu":
            flat(op, name, values, FLOATS)
        elif values.dtype not in FLOATS or values.dim() != 1 or not values.is_contiguous():
            raise KernelError(
                f"{op}: {name} is {values.dtype} of shape {tuple(values.shape)}; give a contiguous "
                f"1-D tensor of one of {', '.join(map(str, FLOATS))}"
            )
        if rows < 1 or values.numel() % rows:
            raise KernelError(
                f"{op}: {name} has {values.numel()} elements, which are not {rows} equal rows"
            )
        return values.numel() // rows

    def _check_messages(self, op: str, messages: Tensor, numel: int) -> None:
        content = f"{numel} elements in {self.bits} bits and blocks of {self.block}"
        rows_of_bytes(op, messages, self.nbytes(numel), content)


def _fits(op: str, name: str, values: Tensor, like: Tensor) -> None:
    if (
        values.dtype not in FLOATS
        or values.shape != like.shape
        or values.device != like.device
        or not values.is_contiguous()
    ):
        raise KernelError(
            f"{op}: {name} is {values.dtype} of shape {tuple(values.shape)} on {values.device}; "
            f"give a contiguous tensor of shape {tuple(like.shape)} on {like.device}"
        )


def _message(device: torch.device, filled: bool) -> Tensor:
    form, values = SymmetricBlocks(4, 32), torch.linspace(-1, 1, 80, device=device)
    out = torch.zeros(2, form.nbytes(40), dtype=torch.uint8, device=device)
    if filled:
        reference.quantize(out, values, None, 4, 32, form.scales_at(40))
    return out


def _quantize_example(device: torch.device) -> tuple[object, ...]:
    return _message(device, False), torch.linspace(-1, 1, 80, device=device), None, 4, 32, 32


def _dequantize_example(device: torch.device) -> tuple[object, ...]:
    return torch.ones(80, device=device), _message(device, True), 4, 32, 32, True


def _sum_example(device: torch.device) -> tuple[object, ...]:
    return torch.ones(40, device=device), _message(device, True), 4, 32, 32


_ROOM = "symmetric_blocks"
QUANTIZE = Kernel(
    "quantize_blocks", f"{_ROOM}:quantize", reference.quantize, example=_quantize_example
)
DEQUANTIZE = Kernel(
    "dequantize_blocks", f"{_ROOM}:dequantize", reference.dequantize, example=_dequantize_example
)
DEQUANTIZE_SUM = Kernel(
    "dequantize_sum", f"{_ROOM}:dequantize_sum", reference.dequantize_sum, example=_sum_example
)


@dataclass(frozen=True)
class BlockCodec:
    """A codec that sends elements as ``blocks``; ``differences``: as differences to the receivers'
    values, which they add. The rounding error of a difference is part of the next one.
    """

    blocks: SymmetricBlocks
    differences: bool = False
    reads_master: ClassVar[bool] = False

    def __str__(self) -> str:
        kind = f"int{self.blocks.bits} blocks of {self.blocks.block}"
        return f"differences in {kind}" if self.differences else kind

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self.blocks.nbytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, rows: int = 1, there: Tensor | None = None) -> Tensor:
        """Encode, see :class:`hf_zero.distributed.collectives.Codec`."""
        return self.blocks.quantize(values, rows, there if self.differences else None)

    @torch.no_grad()
    def decode(self, messages: Tensor, full: Tensor) -> None:
        """Decode, see :class:`hf_zero.distributed.collectives.Codec`."""
        self.blocks.dequantize(messages, full, self.differences)

    @torch.no_grad()
    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode and sum, see :class:`hf_zero.distributed.collectives.Codec`."""
        self.blocks.dequantize_sum(messages, out)
