"""Parameters without values in memory: an engine reads them from a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn


class Source(Protocol):
    """The source of the values of a parameter that has none in memory yet; equal on all ranks."""

    dtype: torch.dtype
    sliceable: bool  # whether reading a part costs in proportion to that part

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, on the CPU, of ``dtype``) with elements in row-major order from
        ``start`` on.
        """

    def whole(self) -> torch.Tensor:
        """Return all elements, on the CPU."""


def pending(shape: Sequence[int], source: Source) -> nn.Parameter:
    """Return a parameter without memory; an engine reads its values from ``source``."""
    made = nn.Parameter(
        torch.zeros((), dtype=source.dtype).expand(tuple(shape)),
        requires_grad=source.dtype.is_floating_point,
    )
    made.__dict__["_hf_zero_source"] = source
    return made


def source_of(parameter: torch.Tensor) -> Source | None:
    return parameter.__dict__.get("_hf_zero_source")
