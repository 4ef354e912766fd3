"""How the elements of a reduce-scatter or an all-gather travel, where it is not as they are."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes what one rank sends to another as a message of bytes, and decodes what has come.

    The result is the same on all ranks, that of the sender included: it is what the messages say.
    """

    @property
    def differences(self) -> bool:
        """Whether messages are differences to what the receivers have."""

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` elements."""

    def encode(
        self, values: torch.Tensor, rows: int = 1, there: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Messages for ``rows`` equal parts of ``values``, 1-D: uint8 [rows, bytes].

        ``there`` is what the receivers have in the place of ``values``, alike on all of them.
        """

    def decode(self, messages: torch.Tensor, full: torch.Tensor) -> None:
        """Put what the rows of ``messages`` say into ``full``, one part after the other."""

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Put the sum over the rows of ``messages``, in their order, into ``out``, fp32."""
