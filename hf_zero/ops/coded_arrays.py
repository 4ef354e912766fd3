"""Arrays whose elements are kept as codes of fewer bits, as storages and optimizer state see them.
Features have the formats: ``moment_blocks.py`` has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class ArrayCodec(Protocol):
    """A format of coded arrays; equal formats have equal codes for equal values."""

    def zeros(self, numel: int, device: torch.device | str = "cpu") -> CodedArray:
        """Return ``numel`` zeros."""

    def sizes(self, numel: int) -> tuple[int, int]:
        """Return the bytes of the codes and of the scales of ``numel`` elements."""

    def over(self, codes: Tensor, scales: Tensor) -> CodedArray:
        """Return the array in this memory, uint8 each."""


class CodedArray(ABC):
    """Numbers in fewer bits: the ``codes`` of its elements, and ``scales`` of several each."""

    codes: Tensor
    scales: Tensor

    @property
    @abstractmethod
    def codec(self) -> ArrayCodec:
        """The format."""

    @property
    def numel(self) -> int:
        return self.codes.numel()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @abstractmethod
    def encode(self, source: Tensor) -> None:
        """Encode the values of ``source`` (fp32 [n]), each as the nearest code."""

    @abstractmethod
    def decode(self) -> Tensor:
        """Return the values, fp32 [n], in new memory."""

    def values(self, start: int, stop: int) -> Tensor:
        """Return the values of elements ``[start, stop)``, fp32, in new memory."""
        return self.decode()[start:stop]

    @abstractmethod
    def put(self, start: int, values: Tensor) -> None:
        """Overwrite the elements from ``start`` on."""

    @abstractmethod
    def __getitem__(self, span: slice) -> CodedArray:
        """Return a view of elements ``[span.start, span.stop)``."""

    def clone(self) -> CodedArray:
        """Return a copy."""
        copy = self.codec.zeros(self.numel, self.codes.device)
        copy.copy_(self)
        return copy

    def copy_(self, other: CodedArray) -> None:
        """Overwrite all elements with those of ``other``, which may be in another format."""
        if other.codec != self.codec:
            self.encode(other.decode().to(self.codes.device))
        else:
            self.codes.copy_(other.codes)
            self.scales.copy_(other.scales)


StateArray = Tensor | CodedArray


def values_of(array: StateArray, start: int, stop: int) -> Tensor:
    """Return elements ``[start, stop)`` of ``array``: a view, or decoded if they are codes."""
    if isinstance(array, CodedArray):
        return array.values(start, stop)
    return array[start:stop]


def decoded(array: StateArray) -> Tensor:
    """Return the elements of ``array``: itself, or a decoded copy if they are codes."""
    return array.decode() if isinstance(array, CodedArray) else array
