"""Symmetric blocks as the codec of a collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.ops.symmetric_blocks import SymmetricBlocks


@dataclass(frozen=True)
class BlockCodec:
    """Elements travel as ``blocks``; ``differences``: as differences to what receivers have, to
    which they are added. What is lost of a difference is in the next one.
    """

    blocks: SymmetricBlocks
    differences: bool = False

    def __str__(self) -> str:
        kind = f"int{self.blocks.bits} blocks of {self.blocks.block}"
        return f"differences in {kind}" if self.differences else kind

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` elements."""
        return self.blocks.nbytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, rows: int = 1, there: Tensor | None = None) -> Tensor:
        """See :class:`hf_zero.distributed.codec.Codec`."""
        return self.blocks.quantise(values, rows, there if self.differences else None)

    @torch.no_grad()
    def decode(self, messages: Tensor, full: Tensor) -> None:
        """See :class:`hf_zero.distributed.codec.Codec`."""
        self.blocks.dequantise(messages, full, self.differences)

    @torch.no_grad()
    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """See :class:`hf_zero.distributed.codec.Codec`."""
        self.blocks.dequantise_sum(messages, out)
