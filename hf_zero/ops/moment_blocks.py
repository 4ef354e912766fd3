"""Moments in 8 bits: a code per element and one fp32 scale per block of 256.

The quantization is block-wise, with a non-linear code (Dettmers et al. 2021, arXiv:2110.02861). The
scale is the block's largest magnitude. A code is a small floating-point number in units of the
scale, eight to an octave, the highest of them 1: with a sign (first moments) down to 1.25 * 2^-16,
without (second moments) down to 1.25 * 2^-32, and 0. Without a sign no element but 0 becomes 0.
Decoding and encoding again gives the same codes, so state saved in fp32 loses nothing. A block with
a value that is not finite decodes to NaN throughout; a block whose largest magnitude is below 2^-90
is zero.

``dynamic`` Blocks have bitsandbytes' codes instead (``dynamic_map.py``), rounded to nearest. Their
map has no -1, so the scale of a block whose largest magnitude is negative is not in its values:
encoding values that some block decodes to finds that block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import dynamic_map, native, reference
from hf_zero.ops.coded_arrays import CodedArray
from hf_zero.ops.native import (
    FP32,
    SIGNED_BLOCKS,
    SIGNED_DYNAMIC,
    UNSIGNED_BLOCKS,
    UNSIGNED_DYNAMIC,
    flat,
)
from hf_zero.ops.reference import BLOCK as BLOCK


def core_for(tensor: Tensor) -> ModuleType | None:
    """Return the native core, with the dynamic maps, or None if the reference must run."""
    core = native.core() if tensor.device.type == "cpu" else None
    if core is not None:
        _set_maps(core)
    return core


@cache
def _set_maps(core: ModuleType) -> None:
    for signed in (False, True):
        tables = (dynamic_map.values(signed), *dynamic_map.regions(signed))
        core.set_dynamic_map(signed, *(table.data_ptr() for table in tables))


@dataclass(frozen=True)
class BlocksFormat:
    """The format of :class:`Blocks`: whether codes have a sign, and are of the dynamic map."""

    signed: bool = True
    dynamic: bool = False

    def zeros(self, numel: int, device: torch.device | str = "cpu") -> Blocks:
        """Return ``numel`` zeros."""
        return Blocks.zeros(numel, self.signed, self.dynamic, device)

    def sizes(self, numel: int) -> tuple[int, int]:
        """Return the bytes of the codes and of the scales of ``numel`` elements."""
        return numel, 4 * -(-numel // BLOCK)

    def over(self, codes: Tensor, scales: Tensor) -> Blocks:
        """Return the blocks in this memory, uint8 each."""
        return Blocks(codes, scales.view(torch.float32), self.signed, self.dynamic)


@dataclass(eq=False)
class Blocks(CodedArray):
    """``numel`` numbers in ``numel`` bytes and a scale for each 256, in the memory of any device.

    Attributes:
        codes: uint8 [n].
        scales: float32 [ceil(n / 256)].
        signed: whether codes have a sign.
        dynamic: whether codes are those of bitsandbytes' dynamic map.
    """

    codes: Tensor
    scales: Tensor
    signed: bool
    dynamic: bool = False

    def __post_init__(self) -> None:
        device = self.codes.device.type
        flat("Blocks", "codes", self.codes, (torch.uint8,), device=device)
        flat("Blocks", "scales", self.scales, FP32, -(-self.numel // BLOCK), device)

    @classmethod
    def zeros(
        cls, numel: int, signed: bool, dynamic: bool = False, device: torch.device | str = "cpu"
    ) -> Blocks:
        """Return ``numel`` zeros."""
        zero = reference.ZERO_CODE if dynamic and signed else 0
        codes = torch.full((numel,), zero, dtype=torch.uint8, device=device)
        scales = torch.zeros(-(-numel // BLOCK), dtype=torch.float32, device=device)
        return cls(codes, scales, signed, dynamic)

    @property
    def codec(self) -> BlocksFormat:
        """The format."""
        return BlocksFormat(self.signed, self.dynamic)

    @property
    def kind(self) -> int:
        """The kind of the arrays in kernels/cpu/kernels.h."""
        if self.dynamic:
            return SIGNED_DYNAMIC if self.signed else UNSIGNED_DYNAMIC
        return SIGNED_BLOCKS if self.signed else UNSIGNED_BLOCKS

    def encode(self, source: Tensor) -> None:
        """Encode the values of ``source`` (fp32 [n]), each as the nearest code."""
        flat("Blocks.encode", "source", source, FP32, self.numel, self.codes.device.type)
        core = core_for(self.codes)
        if core is not None:
            core.encode(
                self.codes.data_ptr(),
                self.scales.data_ptr(),
                self.kind,
                source.data_ptr(),
                self.numel,
            )
        else:
            make = reference.encode_dynamic if self.dynamic else reference.encode
            codes, scales = make(source, self.signed)
            self.codes.copy_(codes)
            self.scales.copy_(scales)
        if self.dynamic and self.signed:
            self._find_scales(source)

    def _find_scales(self, source: Tensor) -> None:
        """Take the scale that gives exactly ``source`` in each block that has one."""
        blocks = self.scales.numel()
        padding = (0, blocks * BLOCK - self.numel)
        values = torch.nn.functional.pad(source, padding).view(blocks, BLOCK)
        if not blocks:
            return
        lowest = values.amin(1)
        (chosen,) = torch.nonzero(
            (-lowest >= values.amax(1)) & (lowest < 0) & lowest.isfinite(), as_tuple=True
        )
        nearest = lowest[chosen] / dynamic_map.values(True)[0].to(source.device)
        infinity = torch.full_like(nearest, torch.inf)
        codes = torch.nn.functional.pad(self.codes, padding).view(blocks, BLOCK)
        matched = torch.zeros_like(nearest, dtype=torch.bool)
        for scales in (
            nearest,
            torch.nextafter(nearest, infinity),
            torch.nextafter(nearest, -infinity),
        ):
            those = values[chosen]
            encoded, _ = reference.encode_dynamic(those.reshape(-1), True, scales)
            decoded = reference.decode(encoded, scales, True, True).view(-1, BLOCK)
            exact = decoded.eq(those).all(1) & ~matched
            self.scales[chosen[exact]] = scales[exact]
            codes[chosen[exact]] = encoded.view(-1, BLOCK)[exact]
            matched |= exact
        if bool(matched.any()):
            self.codes.copy_(codes.view(-1)[: self.numel])

    def put(self, start: int, values: Tensor) -> None:
        """Overwrite the elements from ``start`` on, which must be the first of a block."""
        stop = start + values.numel()
        part = self.narrow(start, min(-(-stop // BLOCK) * BLOCK, self.numel) - start)
        whole = part.decode()
        whole[: values.numel()] = values
        part.encode(whole)

    def decode(self) -> Tensor:
        """Return the values, fp32 [n], in new memory."""
        core = core_for(self.codes)
        if core is None:
            return reference.decode(self.codes, self.scales, self.signed, self.dynamic)
        out = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        core.decode(
            out.data_ptr(), self.codes.data_ptr(), self.scales.data_ptr(), self.kind, self.numel
        )
        return out

    def values(self, start: int, stop: int) -> Tensor:
        first, last = start - start % BLOCK, min(self.numel, stop + -stop % BLOCK)
        return self.narrow(first, last - first).decode()[start - first : stop - first]

    def __getitem__(self, span: slice) -> Blocks:
        """Return :meth:`narrow` of elements ``[span.start, span.stop)``."""
        return self.narrow(span.start, span.stop - span.start)

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
            self.codes[start:stop],
            self.scales[start // BLOCK : -(-stop // BLOCK)],
            self.signed,
            self.dynamic,
        )


Moment = Tensor | Blocks
