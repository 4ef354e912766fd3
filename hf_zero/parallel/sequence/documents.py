"""Which documents a batch holds: sequences that are packed one behind another, told apart by their
position_ids, which begin anew.

They travel through a model in the place of its attention mask, as a small tensor on the CPU that
is an argument of every block: so a recomputation in the backward has those of its own forward. An
attention mask of transformers is boolean or a sum of scores; 4 dimensions of int32 are ours.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import defaultdict
from dataclasses import dataclass

import torch

ALL_ROWS = -1
_of_thread = threading.local()  # .has_positions: of the mask that was asked for last


def note_positions(given: bool) -> None:
    """Note that a model of this thread makes a mask, and whether it has ``given`` its positions."""
    _of_thread.has_positions = given


def knows_positions() -> bool:
    """Whether the model that makes a mask in this thread hands over its position_ids, by which
    transformers tells packed sequences apart. Some read them in their embeddings alone.
    """
    return getattr(_of_thread, "has_positions", True)


@dataclass(frozen=True)
class Documents:
    """``spans`` are (row, first token, last token + 1) of each document of a batch of ``length``
    tokens a row; the row :data:`ALL_ROWS` stands for all of them. ``number`` says whose batch it
    is.
    """

    number: int
    length: int
    spans: tuple[tuple[int, int, int], ...]

    @classmethod
    def one_a_row(cls, length: int) -> Documents:
        """One document of ``length`` tokens in each row, of a batch that has no number yet."""
        return cls(0, length, ((ALL_ROWS, 0, length),))

    @property
    def code(self) -> int:
        """32 bits that differ where documents do; never 0."""
        return zlib.crc32(repr((self.length, self.spans)).encode()) or 1

    @classmethod
    def of(cls, number: int, positions: torch.Tensor) -> Documents:
        """``positions``: [rows, tokens] of whole sequences. The host waits for a device."""
        positions = positions.cpu()
        rows, length = positions.shape
        begins = torch.ones(rows, length, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
        if bool((begins == begins[0]).all()):
            rows, begins = 1, begins[:1]
        spans = []
        for row in range(rows):
            starts = [*begins[row].nonzero().flatten().tolist(), length]
            place = ALL_ROWS if rows == 1 else row
            spans += [(place, start, end) for start, end in itertools.pairwise(starts)]
        return cls(number, length, tuple(spans))

    @property
    def packed(self) -> bool:
        """Whether some row holds more than one."""
        return any(end - start < self.length for _, start, end in self.spans)

    def by_length(self, rows: int) -> dict[int, list[int]]:
        """By the length of a document, where each of this length begins: row x length + token."""
        found = defaultdict(list)
        for row, start, end in self.spans:
            for each in range(rows) if row == ALL_ROWS else (row,):
                found[end - start].append(each * self.length + start)
        return found

    def as_mask(self) -> torch.Tensor:
        """As a tensor that stands for an attention mask."""
        head = (self.number, self.length, len(self.spans))
        return torch.tensor([head, *self.spans], dtype=torch.int32)[None, None]

    @classmethod
    def from_mask(cls, mask: torch.Tensor | None) -> Documents | None:
        """What :meth:`as_mask` has made; None for another mask, or none."""
        if mask is None or mask.dtype != torch.int32 or mask.dim() != 4:
            return None
        (number, length, count), *spans = mask[0, 0].tolist()
        assert count == len(spans)
        return cls(number, length, tuple(map(tuple, spans)))  # type: ignore[arg-type]
