"""Encodings of what a reduce-scatter or an all-gather sends, such as quantized blocks."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Encode what one rank sends to another as a message of bytes, and decode what it receives.

    The result is the same on all ranks: the sender, too, uses the decoded values of its message.
    """

    @property
    def differences(self) -> bool:
        """Whether messages are differences from the values that the receivers already have."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""

    def encode(
        self, values: torch.Tensor, rows: int = 1, there: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return messages for ``rows`` equal parts of ``values``, 1-D: uint8 [rows, bytes].

        ``there``: the receivers' present values at the place of ``values``, equal on all of them.
        """

    def decode(self, messages: torch.Tensor, full: torch.Tensor) -> None:
        """Decode the rows of ``messages`` into ``full``, one part after the other."""

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum over the rows of ``messages``, in their order, to ``out``, fp32."""
