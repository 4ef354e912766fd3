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
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import native
from hf_zero.ops import symmetric_blocks_reference as reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.native import FLOATS, address, flat, kind, rows_of_bytes

BITS = (4, 8)
BLOCKS = (32, 64, 128, 256, 512, 1024)  # the largest is a tile of the kernels
ALIGNMENT = 16  # bytes; codes and scales of a message begin at multiples of it


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
        return -(-numel * self.bits // (8 * ALIGNMENT)) * ALIGNMENT

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self.scales_at(numel) + -(-2 * self.scales(numel) // ALIGNMENT) * ALIGNMENT

    def quantize(self, source: Tensor, rows: int = 1, minus: Tensor | None = None) -> Tensor:
        """Return a message for each of ``rows`` equal parts of ``source``: uint8 [rows, nbytes].

        Args:
            source: fp32, bf16 or fp16 [rows * n].
            minus: like ``source``, of any of its dtypes: the difference to it is quantized.
        """
        numel = self._check("quantize", "source", source, rows)
        if minus is not None:
            _check_alike("quantize", "minus", minus, source)
        out = torch.empty(rows, self.nbytes(numel), dtype=torch.uint8, device=source.device)
        core = _core_for(source)
        if core is not None:
            operands = address(source), kind(source), address(minus), kind(minus)
            core.quantize(self._rows(core, out, numel), *operands)
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
        core = _core_for(out)
        if core is not None:
            core.dequantize(self._rows(core, messages, numel), address(out), kind(out), add)
        else:
            DEQUANTIZE(out, messages, self.bits, self.block, self.scales_at(numel), add)

    def dequantize_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode and sum the rows of ``messages``, [rows, nbytes], in fp32 and in their order, into
        ``out``, fp32 [n].
        """
        numel = self._check("dequantize_sum", "out", out, 1)
        if out.dtype != torch.float32:
            raise KernelError(f"dequantize_sum: out is {out.dtype}; sums are taken in fp32")
        self._check_messages("dequantize_sum", messages, numel)
        core = _core_for(out)
        if core is not None:
            core.dequantize_sum(self._rows(core, messages, numel), address(out))
        else:
            DEQUANTIZE_SUM(out, messages, self.bits, self.block, self.scales_at(numel))

    def _rows(self, core: Any, messages: Tensor, numel: int) -> object:
        """Return ``messages`` of ``numel`` elements each as the native core takes them."""
        (rows, nbytes), codes = messages.shape, address(messages)
        scales = codes + self.scales_at(numel)
        return core.Rows(scales, codes, nbytes, self.bits, self.block, rows, numel)

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


def _core_for(tensor: Tensor) -> Any:
    """Return the native core for a tensor on the CPU; None: the kernels compute, or torch does."""
    return native.core() if tensor.device.type == "cpu" else None


def _check_alike(op: str, name: str, values: Tensor, like: Tensor) -> None:
    """Raise KernelError unless ``values`` has the shape and the device of ``like``."""
    if (
        values.dtype not in FLOATS
        or values.shape != like.shape
        or values.device != like.device
        or not values.is_contiguous()
    ):
        raise KernelError(
            f"{op}: {name} is {values.dtype} of shape {tuple(values.shape)} on {values.device}; "
            f"give a contiguous tensor of shape {tuple(like.shape)} on {like.device}, of one of "
            f"{', '.join(map(str, FLOATS))}"
        )


# the messages of the examples: two rows of 40 elements
_FORM, _ROWS, _NUMEL = SymmetricBlocks(4, 32), 2, 40
_FORM_ARGUMENTS = _FORM.bits, _FORM.block, _FORM.scales_at(_NUMEL)


def _values(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, _ROWS * _NUMEL, device=device)


def _empty_messages(device: torch.device) -> Tensor:
    return torch.zeros(_ROWS, _FORM.nbytes(_NUMEL), dtype=torch.uint8, device=device)


def _messages(device: torch.device) -> Tensor:
    messages = _empty_messages(device)
    reference.quantize(messages, _values(device), None, *_FORM_ARGUMENTS)
    return messages


def _quantize_example(device: torch.device) -> tuple[object, ...]:
    return _empty_messages(device), _values(device), None, *_FORM_ARGUMENTS


def _dequantize_example(device: torch.device) -> tuple[object, ...]:
    return torch.ones(_ROWS * _NUMEL, device=device), _messages(device), *_FORM_ARGUMENTS, True


def _sum_example(device: torch.device) -> tuple[object, ...]:
    return torch.ones(_NUMEL, device=device), _messages(device), *_FORM_ARGUMENTS


_MODULE = "symmetric_blocks"  # of the Triton kernels
QUANTIZE = Kernel(
    "quantize_blocks", f"{_MODULE}:quantize", reference.quantize, example=_quantize_example
)
DEQUANTIZE = Kernel(
    "dequantize_blocks", f"{_MODULE}:dequantize", reference.dequantize, example=_dequantize_example
)
DEQUANTIZE_SUM = Kernel(
    "dequantize_sum", f"{_MODULE}:dequantize_sum", reference.dequantize_sum, example=_sum_example
)
