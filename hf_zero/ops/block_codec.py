"""Symmetric blocks as the codec of a collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.ops.symmetric_blocks import SymmetricBlocks


@dataclass(frozen=True)
class BlockCodec:
    """A codec that sends elements as ``blocks``; ``differences``: as differences to the receivers'
    values, which they add. The rounding error of a difference is part of the next one.
    """

    blocks: SymmetricBlocks
    differences: bool = False

    def __str__(self) -> str:
        kind = f"int{self.blocks.bits} blocks of {self.blocks.block}"
        return f"differences in {kind}" if self.differences else kind

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self.blocks.nbytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, rows: int = 1, there: Tensor | None = None) -> Tensor:
        """Encode, see :class:`hf_zero.distributed.collectives.Codec`."""
        return self.blocks.quantise(values, rows, there if self.differences else None)

    @torch.no_grad()
    def decode(self, messages: Tensor, full: Tensor) -> None:
        """Decode, see :class:`hf_zero.distributed.collectives.Codec`."""
        self.blocks.dequantise(messages, full, self.differences)

    @torch.no_grad()
    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode and sum, see :class:`hf_zero.distributed.collectives.Codec`."""
        self.blocks.dequantise_sum(messages, out)
