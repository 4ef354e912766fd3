"""Parameters whose values are nowhere yet: an engine takes them from a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn


class Source(Protocol):
    """Where the values of a parameter come from that is nowhere yet; alike on all ranks."""

    dtype: torch.dtype
    sliceable: bool  # whether reading a part costs about that part

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, on the CPU, of ``dtype``) with the elements from ``start`` on, in
        row-major order.
        """

    def whole(self) -> torch.Tensor:
        """All elements, on the CPU."""


def pending(shape: Sequence[int], source: Source) -> nn.Parameter:
    """A parameter without memory, whose values an engine takes from ``source``."""
    made = nn.Parameter(
        torch.zeros((), dtype=source.dtype).expand(tuple(shape)),
        requires_grad=source.dtype.is_floating_point,
    )
    made.__dict__["_hf_zero_source"] = source
    return made


def source_of(parameter: torch.Tensor) -> Source | None:
    return parameter.__dict__.get("_hf_zero_source")
