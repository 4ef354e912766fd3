"""The documents of packed sequences, told apart by their position_ids, which restart in each.

:class:`Documents` travel through a model in place of its attention mask, as a small CPU tensor that
is an argument of every block, so that a recomputation in the backward has those of its own forward.
An attention mask of transformers is boolean or additive; one of 4 dimensions in int32 is ours.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import defaultdict
from dataclasses import dataclass

import torch

ALL_ROWS = -1
_of_thread = threading.local()  # .has_positions: for the mask requested last


def note_positions(has_positions: bool) -> None:
    """Note that a model of this thread makes a mask, and whether it passed positions."""
    _of_thread.has_positions = has_positions


def knows_positions() -> bool:
    """Return whether the model that creates a mask in this thread passes its position_ids, by which
    transformers tells packed sequences apart. Some read them only in their embeddings.
    """
    return getattr(_of_thread, "has_positions", True)


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of ``length`` tokens a row. ``spans``: (row, first token, last token
    + 1) of each; the row :data:`ALL_ROWS` means every row. ``number``: that of the sequence
    parallelism the batch belongs to. ``window``: number of tokens, itself and those before it, to
    which a token attends; 0: all before it in its document.
    """

    number: int
    length: int
    spans: tuple[tuple[int, int, int], ...]
    window: int = 0

    @classmethod
    def one_a_row(cls, length: int) -> Documents:
        """Return one document of ``length`` tokens per row, for a batch without a number so far."""
        return cls(0, length, ((ALL_ROWS, 0, length),))

    @property
    def code(self) -> int:
        """A 32-bit hash of length and spans; never 0."""
        return zlib.crc32(repr((self.length, self.spans)).encode()) or 1

    @classmethod
    def from_positions(cls, number: int, positions: torch.Tensor) -> Documents:
        """Find the documents in ``positions`` [rows, tokens] of whole sequences. The host waits."""
        positions = positions.cpu()
        rows, length = positions.shape
        begins = torch.ones(rows, length, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
        if bool((begins == begins[0]).all()):
            rows, begins = 1, begins[:1]
        spans = []
        for row in range(rows):
            starts = [*begins[row].nonzero().flatten().tolist(), length]
            row_of_span = ALL_ROWS if rows == 1 else row
            spans += [(row_of_span, start, end) for start, end in itertools.pairwise(starts)]
        return cls(number, length, tuple(spans))

    @property
    def packed(self) -> bool:
        """Return whether a row holds more than one document."""
        return any(end - start < self.length for _, start, end in self.spans)

    @property
    def windowed(self) -> bool:
        """Return whether a token does not attend to all before it in its document."""
        longest = max(end - start for _, start, end in self.spans)
        return 0 < self.window < longest

    def by_length(self, rows: int) -> dict[int, list[int]]:
        """Return the first token of each document, row x length + token, by document length."""
        starts = defaultdict(list)
        for row, start, end in self.spans:
            for r in range(rows) if row == ALL_ROWS else (row,):
                starts[end - start].append(r * self.length + start)
        return starts

    def first_keys(self, rows: int) -> torch.Tensor:
        """Return the first token to which each token of ``rows`` attends: [rows, length], or
        [1, length] if it is the same in every row.
        """
        same = all(row == ALL_ROWS for row, _, _ in self.spans)
        shape = 1 if same else rows, self.length
        first = torch.zeros(shape, dtype=torch.int64, device="cpu")  # whatever the default
        for row, start, end in self.spans:
            first[slice(None) if row == ALL_ROWS else row, start:end] = start
        if self.window:
            tokens = torch.arange(self.length, device="cpu")
            first = torch.maximum(first, tokens - self.window + 1)
        return first

    def as_mask(self) -> torch.Tensor:
        """Encode the documents as a tensor that takes the place of an attention mask."""
        head = (self.number, self.length, self.window)
        return torch.tensor([head, *self.spans], dtype=torch.int32)[None, None]

    @classmethod
    def from_mask(cls, mask: torch.Tensor | None) -> Documents | None:
        """Decode the result of :meth:`as_mask`; None for any other mask, or None."""
        if mask is None or mask.dtype != torch.int32 or mask.dim() != 4:
            return None
        (number, length, window), *spans = mask[0, 0].tolist()
        return cls(number, length, tuple(map(tuple, spans)), window)  # type: ignore[arg-type]
