"""Training state of one flat beside its values: master weights and moments, in arrays over
``owned``, wherever they live.

An array is worked on in *pieces*, runs of elements of one optimizer group that are short enough for
a buffer. Whoever updates asks for a piece ahead, holds it, changes what it got and releases it;
whoever reads or loads a whole array fetches and stores. The rows are host memory (here) and files
(``states_in_files.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hf_zero.ops.host import Blocks, Moment

MASTER = "master"
Piece = tuple[int, int]  # elements [start, stop) of owned
Take = Callable[[int, torch.dtype], torch.Tensor]


class States(Protocol):
    """Arrays of one flat by name; :data:`MASTER` is always one of them."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    def names(self) -> list[str]: ...

    def add(self, name: str, like: Form) -> None:
        """A new array of zeros; ``like`` says how its elements are kept."""

    def dtype(self, name: str) -> torch.dtype:
        """Of what :meth:`fetch` gives."""

    def fetch(self, name: str) -> torch.Tensor:
        """The whole array in numbers: [owned].

        In memory it is the array itself unless that is quantised; else a copy.
        """

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from ``start`` on."""

    def ahead(self, piece: int) -> None:
        """Say that ``piece`` will be held soon."""

    def hold(self, piece: int) -> dict[str, Moment]:
        """The arrays of ``piece``, to be changed in place until :meth:`release`."""

    def release(self, piece: int) -> None:
        """Keep what has been changed."""

    def entry(self, name: str) -> torch.Tensor:
        """What the optimizer's books have between steps: the array if it is in memory and made
        of numbers, else one like it without memory.
        """

    def nbytes(self) -> dict[str, int]:
        """Bytes by tier: ``ram`` and ``disk``."""

    def close(self) -> None:
        """Give memory and files back."""


class Form:
    """How the elements of an array are kept: as numbers of a dtype, or in 8-bit blocks."""

    def __init__(self, dtype: torch.dtype, blocks: bool = False, signed: bool = True):
        self.dtype, self.blocks, self.signed = dtype, blocks, signed


def form_of(moments: str, dtype: torch.dtype, signed: bool = True) -> Form:
    """How a moment of ``dtype`` is kept where ``moments`` is ``"fp32"``, ``"bf16"`` or
    ``"int8"``.
    """
    if moments == "bf16":
        return Form(torch.bfloat16)
    return Form(dtype, blocks=moments == "int8", signed=signed)


def put(array: Moment, start: int, values: torch.Tensor) -> None:
    """Overwrite elements of one piece from ``start`` on."""
    if isinstance(array, Blocks):
        whole = array.decode()
        whole[start : start + values.numel()].copy_(values)
        array.encode(whole)
    else:
        own = array[start : start + values.numel()]
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)


class StatesInMemory:
    """In host memory: arrays of numbers lie whole, quantised ones in pieces."""

    def __init__(self, numel: int, pieces: Sequence[Piece], take: Take):
        self.pieces = list(pieces)
        self._numel = numel
        self._take = take
        self._whole: dict[str, torch.Tensor] = {}
        self._blocks: dict[str, list[Blocks]] = {}

    def names(self) -> list[str]:
        return [*self._whole, *self._blocks]

    def add(self, name: str, like: Form) -> None:
        if like.blocks:
            self._blocks[name] = [
                Blocks.zeros(stop - start, like.signed) for start, stop in self.pieces
            ]
        else:
            self._whole[name] = self._take(self._numel, like.dtype)

    def dtype(self, name: str) -> torch.dtype:
        return self._whole[name].dtype if name in self._whole else torch.float32

    def fetch(self, name: str) -> torch.Tensor:
        if name in self._whole:
            return self._whole[name]
        out = torch.zeros(self._numel)
        for (start, stop), blocks in zip(self.pieces, self._blocks[name]):
            out[start:stop] = blocks.decode()
        return out

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        if name in self._whole:
            put(self._whole[name], start, values)
            return
        for (begin, end), blocks in zip(self.pieces, self._blocks[name]):
            first, last = max(begin, start), min(end, start + values.numel())
            if first < last:
                put(blocks, first - begin, values[first - start : last - start])

    def ahead(self, piece: int) -> None:
        """It is here."""

    def hold(self, piece: int) -> dict[str, Moment]:
        start, stop = self.pieces[piece]
        held: dict[str, Moment] = {name: array[start:stop] for name, array in self._whole.items()}
        return held | {name: blocks[piece] for name, blocks in self._blocks.items()}

    def release(self, piece: int) -> None:
        """It was changed where it is."""

    def entry(self, name: str) -> torch.Tensor:
        return self._whole[name] if name in self._whole else torch.zeros(1).expand(self._numel)

    def nbytes(self) -> dict[str, int]:
        numbers = sum(array.nbytes for array in self._whole.values())
        return {
            "ram": numbers
            + sum(blocks.nbytes for each in self._blocks.values() for blocks in each),
            "disk": 0,
        }

    def close(self) -> None:
        self._whole.clear()
        self._blocks.clear()
