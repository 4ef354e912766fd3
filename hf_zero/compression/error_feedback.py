"""Symmetric blocks with error feedback, as the codec of a reduction (LoCo, Xie et al. 2024,
arXiv:2407.04480).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_zero.compression.block_codecs import BlockCodec
from hf_zero.config import ZeroConfig
from hf_zero.config.messages import CompressedCommunication, LocoSection
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from hf_zero.zero.feature import Feature

if TYPE_CHECKING:
    from hf_zero.zero.step.optimizer_step import OptimizerStep


def sends_few_bits(settings: ZeroConfig) -> bool:
    """Return whether ``settings`` ask for gradients in fewer bits than they have."""
    return bool(
        settings.section_of(CompressedCommunication).bits or settings.zero.quantized_gradients
    )


class ErrorCodec:
    """``codec`` for one flat buffer, with an error buffer in int8 blocks. Per message, of values
    ``g``::

        z = g + e;    q = decoded message of z;    e <- beta * e + (1 - beta) * (z - q)

    Later messages recover the loss: the sum of (g - q) over them is e / (1 - beta).
    """

    differences = False
    reads_master = False

    def __init__(self, codec: BlockCodec, beta: float) -> None:
        self._codec, self._beta = codec, beta
        self._blocks = SymmetricBlocks(8, codec.blocks.block)
        self._numel = 0  # per row
        self._error: Tensor | None = None

    def __str__(self) -> str:
        return f"{self._codec} with errors fed back"

    @property
    def error(self) -> Tensor | None:
        """The error as messages of int8 blocks, [rows, bytes]; None: it is zero."""
        return self._error

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self._codec.nbytes(numel)

    def error_nbytes(self, numel: int, rows: int) -> int:
        """Return the bytes of :attr:`error` once messages of ``rows`` times ``numel`` elements have
        been encoded.
        """
        return rows * self._blocks.nbytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, rows: int = 1, current: Tensor | None = None) -> Tensor:
        """Encode, see :class:`~hf_zero.distributed.collectives.Codec`. Uses 8 bytes an element."""
        corrected = values.to(torch.float32, copy=True)
        if self._error is not None:
            self._blocks.dequantize(self._error, corrected, add=True)
        messages = self._codec.encode(corrected, rows)
        decoded = torch.empty_like(corrected)
        self._codec.decode(messages, decoded)
        # e is wanted - values
        corrected.sub_(decoded, alpha=1 - self._beta).sub_(values, alpha=self._beta)
        self._numel = corrected.numel() // rows
        self._error = self._blocks.quantize(corrected, rows)
        # an overflow has been sent: fed back, it would spoil each later gradient of its block
        self._scales(self._error).nan_to_num_(nan=0.0)
        return messages

    def decode(self, messages: Tensor, full: Tensor) -> None:
        """Decode, see :class:`hf_zero.distributed.collectives.Codec`."""
        self._codec.decode(messages, full)

    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Decode and sum, see :class:`hf_zero.distributed.collectives.Codec`."""
        self._codec.decode_sum(messages, out)

    def clear(self) -> None:
        """Reset the error to zero."""
        self._error = None

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply the error by ``factor``, because values are scaled by it from now on."""
        if self._error is not None:
            self._scales(self._error).mul_(factor)

    def _scales(self, error: Tensor) -> Tensor:
        """Return a view of the scales of the blocks of ``error``: bf16 [rows, blocks]."""
        start = self._blocks.scales_at(self._numel)
        stop = start + 2 * self._blocks.scales(self._numel)
        return error[:, start:stop].view(torch.bfloat16)


class ErrorFeedback(Feature):
    """The error buffers of an engine, cleared after every ``every`` steps."""

    def __init__(self, every: int):
        self._every, self._scale = every, 1.0
        self._codecs: list[ErrorCodec] = []

    @classmethod
    def from_config(cls, settings: ZeroConfig) -> ErrorFeedback | None:
        """Return the error feedback that ``settings`` ask for; None: none."""
        loco = settings.section_of(LocoSection)
        return cls(loco.every) if loco.on and sends_few_bits(settings) else None

    def bind(self, step: OptimizerStep) -> None:
        codecs = (flat.spec.reduce_codec for flat in step.model.trainable)
        self._codecs = [codec for codec in codecs if isinstance(codec, ErrorCodec)]
        self._scale = step.scaler.scale

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        if overflow or number % self._every == 0:
            self.forget(scale)
        elif scale != self._scale:
            for codec in self._codecs:
                codec.rescale(scale / self._scale)
        self._scale = scale

    def forget(self, scale: float) -> None:
        for codec in self._codecs:
            codec.clear()
        self._scale = scale

    def remove(self) -> None:
        self._codecs = []

    def state_bytes(self) -> Mapping[str, int]:
        errors = (codec.error for codec in self._codecs)
        return {"gradients": sum(error.nbytes for error in errors if error is not None)}
