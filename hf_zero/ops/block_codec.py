"""The codec of a collective that sends symmetric blocks, or blocks of differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_zero.ops.symmetric_blocks import SymmetricBlocks


@dataclass(frozen=True)
class BlockCodec:
    """A codec (:class:`hf_zero.distributed.collectives.Codec`) that sends elements as ``blocks``;
    ``differences``: as differences to the values that the receivers have, which they add. The
    rounding error of a difference is part of the next one.
    """

    blocks: SymmetricBlocks
    differences: bool = False
    reads_master: ClassVar[bool] = False  # what it encodes are the values of the compute dtype

    def __str__(self) -> str:
        blocks = f"int{self.blocks.bits} blocks of {self.blocks.block}"
        return f"differences in {blocks}" if self.differences else blocks

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self.blocks.nbytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, rows: int = 1, there: Tensor | None = None) -> Tensor:
        """Return a message for each of ``rows`` parts of ``values``. ``there``: what the receivers
        have, read for differences.
        """
        return self.blocks.quantize(values, rows, there if self.differences else None)

    @torch.no_grad()
    def decode(self, messages: Tensor, full: Tensor) -> None:
        """Decode ``messages`` into ``full``, or add them, if they are differences."""
        self.blocks.dequantize(messages, full, self.differences)

    @torch.no_grad()
    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode ``messages`` and write their sum into ``out``."""
        self.blocks.dequantize_sum(messages, out)
