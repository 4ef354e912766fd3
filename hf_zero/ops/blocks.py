"""Moments in 8 bits: a code per element and one fp32 scale per block of 256.

Block-wise quantisation with a non-linear code (Dettmers et al. 2021, arXiv:2110.02861). The scale
is the block's largest magnitude. A code is a small floating-point number in units of the scale,
eight to an octave, the highest of them 1: with a sign (first moments) down to 1.25 * 2^-16, without
(second moments) down to 1.25 * 2^-32, and 0. Without a sign no element but 0 becomes 0. Decoding
and encoding again gives the same codes, so state saved in fp32 loses nothing.

A block with a value that is not finite decodes to NaN throughout; a block whose largest magnitude
is below 2^-90 is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import native, reference
from hf_zero.ops.checks import FP32, SIGNED_BLOCKS, UNSIGNED_BLOCKS, flat

BLOCK = 256


@dataclass(eq=False)
class Blocks:
    """``numel`` numbers in ``numel`` bytes and a scale for each 256.

    Attributes:
        codes: uint8 [n].
        scales: float32 [ceil(n / 256)].
        signed: whether codes have a sign bit.
    """

    codes: Tensor
    scales: Tensor
    signed: bool

    def __post_init__(self) -> None:
        flat("Blocks", "codes", self.codes, (torch.uint8,))
        flat("Blocks", "scales", self.scales, FP32, -(-self.numel // BLOCK))

    @classmethod
    def zeros(cls, numel: int, signed: bool) -> Blocks:
        """Return ``numel`` zeros."""
        return cls(torch.zeros(numel, dtype=torch.uint8), torch.zeros(-(-numel // BLOCK)), signed)

    @property
    def numel(self) -> int:
        return self.codes.numel()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def kind(self) -> int:
        """The kind of the arrays in kernels/cpu/kernels.h."""
        return SIGNED_BLOCKS if self.signed else UNSIGNED_BLOCKS

    def encode(self, source: Tensor) -> None:
        """Encode the values of ``source`` (fp32 [n]), each as the nearest code."""
        flat("Blocks.encode", "source", source, FP32, self.numel)
        core = native.core()
        if core is None:
            codes, scales = reference.encode(source, self.signed)
            self.codes.copy_(codes)
            self.scales.copy_(scales)
        else:
            core.encode(
                self.codes.data_ptr(),
                self.scales.data_ptr(),
                self.kind,
                source.data_ptr(),
                self.numel,
            )

    def decode(self) -> Tensor:
        """Return the values, fp32 [n], in new memory."""
        core = native.core()
        if core is None:
            return reference.decode(self.codes, self.scales, self.signed)
        out = torch.empty(self.numel, dtype=torch.float32)
        core.decode(
            out.data_ptr(), self.codes.data_ptr(), self.scales.data_ptr(), self.kind, self.numel
        )
        return out

    def narrow(self, start: int, length: int) -> Blocks:
        """Return a view of elements [start, start + length), which must begin at a block and end at
        one or at the end.

        Raises:
            KernelError: they do not, or are out of range.
        """
        stop = start + length
        if (
            start < 0
            or length < 0
            or stop > self.numel
            or start % BLOCK
            or (stop % BLOCK and stop != self.numel)
        ):
            raise KernelError(
                f"Blocks.narrow({start}, {length}) of {self.numel} elements: begin and end at "
                f"multiples of {BLOCK}, or at the end"
            )
        return Blocks(
            self.codes[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)], self.signed
        )


Moment = Tensor | Blocks
