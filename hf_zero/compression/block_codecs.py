"""Codecs of collectives in blocks of few bits: of one message, and of the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_zero.distributed.collectives import Codec
from hf_zero.errors import KernelError
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from hf_zero.zero.layout.parameter_codec import FlatUse, MessageCodecs, ParameterCodec, ParameterUse

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Default block size by bits. Adam divides by the usual magnitude of a gradient element: 4 bits lose
# the elements far below the largest of their block, and a larger block loses more of them
# (scripts/bench/results/compressed_loss-*.jsonl).
DEFAULT_BLOCKS = {4: 64, 8: 256}
SMALLEST_TENSOR = 256  # elements


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
    def encode(self, values: Tensor, rows: int = 1, current: Tensor | None = None) -> Tensor:
        """Return a message for each of ``rows`` parts of ``values``. ``current``: the
        receivers' current values, which differences need. Raises KernelError without them.
        """
        if self.differences and current is None:
            raise KernelError(
                f"encode: {self} are taken from the receivers' values; pass them as `current`"
            )
        return self.blocks.quantize(values, rows, current if self.differences else None)

    @torch.no_grad()
    def decode(self, messages: Tensor, full: Tensor) -> None:
        """Decode ``messages`` into ``full``, or add them, if they are differences."""
        self.blocks.dequantize(messages, full, self.differences)

    @torch.no_grad()
    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode ``messages`` and write their sum into ``out``."""
        self.blocks.dequantize_sum(messages, out)


@dataclass(frozen=True, eq=False)
class BlockwiseCodec(ParameterCodec):
    """Codecs for reductions of gradients and for gathers of weights, in blocks with a scale each;
    None sends values uncompressed.

    gradients: makes the codec of one flat buffer, which may keep state. weights, frozen: for
    gathers at stage 3 of trainable and of frozen parameters. deltas: for the changes of a step,
    where all ranks keep whole weights. momentum: for a momentum that is sent in place of gradients.
    smallest: tensors with fewer elements, and 1-D tensors, are sent uncompressed in flat
    buffers of their own: next to a matrix their elements would share a block scale that is too
    large for them.
    """

    gradients: Callable[[], Codec] | None = None
    weights: Codec | None = None
    frozen: Codec | None = None
    deltas: Codec | None = None
    momentum: SignBlocks | None = None
    smallest: int = SMALLEST_TENSOR

    key = "blocks"

    @property
    def sends_changes(self) -> bool:  # type: ignore[override]
        return self.momentum is not None or self.deltas is not None

    def takes(self, parameter: torch.Tensor, use: ParameterUse) -> bool:
        codecs = (self.gradients, self.weights, self.deltas, self.momentum)
        return (
            not (use.raw or use.outside)
            and any(codecs if use.trains else (self.frozen,))
            and parameter.dim() > 1
            and parameter.numel() >= self.smallest
        )

    def messages(self, flat: FlatUse) -> MessageCodecs:
        layout = flat.layout
        if layout.num_shards == 1 or layout.shard_numel < self.smallest or flat.dtype not in FLOATS:
            return MessageCodecs()
        if not flat.trains:
            return MessageCodecs(gathered=self.frozen if flat.sharded else None)
        return MessageCodecs(
            None if self.gradients is None else self.gradients(),
            self.weights if flat.sharded else None if flat.persistent else self.deltas,
            self.momentum,
        )
