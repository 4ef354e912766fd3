"""Blocks of causal attention between the queries of one rank and the keys of another.

[Note: blocks]
A query attends to an interval of the keys of a rank, given by its document, its window and its own
place. Both ends of the interval stay or grow by one from query to query, except where a document or
a chunk ends. Runs of queries between these places are divided into rectangles, of which every query
attends to every key, and squares, of which a query attends to the keys up to its own place
(``CAUSAL``) or from it on (``REVERSED``: causal if queries and keys are read backwards). Kernels
need no mask for any of them. Blocks of one pattern and size form a batch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from hf_zero.device.pinned import upload
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents


class Pattern(Enum):
    """Keys of a block that a query attends to."""

    FULL = "full"
    CAUSAL = "causal"
    REVERSED = "reversed"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of equally many blocks: ``span`` of every row, or ``places`` [blocks, tokens], row x
    length + token.
    """

    span: slice
    places: torch.Tensor | None = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these tokens of ``tensor`` [rows, length, ...]: [blocks, tokens, ...]."""
        if self.places is None:
            return tensor[:, self.span]
        return tensor.flatten(0, 1)[self.places]

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` [blocks, tokens, ...] to these tokens of the contiguous ``tensor``."""
        if self.places is None:
            tensor[:, self.span] = values
        else:
            tensor.view(-1, *tensor.shape[2:])[self.places] = values

    def add(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` to these tokens of ``tensor``, which is contiguous; a token may be in
        several blocks.
        """
        if self.places is None:
            tensor[:, self.span] += values
        else:
            flat = tensor.view(-1, *tensor.shape[2:])
            flat.index_add_(0, self.places.flatten(), values.flatten(0, 1).to(tensor.dtype))


@dataclass(frozen=True, eq=False)
class AttentionBlocks:
    """Blocks of one pattern and size. Each query is in one of them at most."""

    pattern: Pattern
    queries: Tokens
    keys: Tokens


@functools.lru_cache(maxsize=8)  # called by every layer of a forward, for each kind of layer
def blocks_of(
    documents: Documents, rows: int, ring_rank: int, ranks: int, device: torch.device
) -> tuple[tuple[AttentionBlocks, ...], ...]:
    """Return, for each rank of a ring of ``ranks``, the blocks of its keys and the queries of the
    rank ``ring_rank``. Both have the tokens that :class:`Division` gives them, of ``rows`` rows.
    """
    division, length = Division(context=ranks), documents.length
    tokens = [
        division.part(torch.arange(length, device="cpu")[None], rank)[0] for rank in range(ranks)
    ]
    queries = tokens[ring_rank]
    first = documents.first_keys(rows)[:, queries]
    with torch.inference_mode(False):  # autograd of a later forward may save these cached tensors
        return tuple(
            _between(
                torch.searchsorted(keys, first),
                torch.searchsorted(keys, queries, right=True).expand_as(first),
                rows,
                device,
            )
            for keys in tokens
        )


def _between(
    low: torch.Tensor, high: torch.Tensor, rows: int, device: torch.device
) -> tuple[AttentionBlocks, ...]:
    """Return the blocks of queries that attend to the keys from ``low`` to ``high`` - 1, [rows or
    1, tokens].
    """
    by_pattern: dict[tuple[Pattern, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for row, (lows, highs) in enumerate(zip(low, high)):
        for pattern, query, queries, key, keys in _pieces(lows, highs):
            by_pattern[pattern, queries, keys].append((row, query, key))
    length, same = low.shape[1], low.shape[0] == 1
    blocks = []
    for (pattern, queries, keys), places in by_pattern.items():
        if same and len(places) == 1:
            ((_, query, key),) = places
            spans = slice(query, query + queries), slice(key, key + keys)
            blocks.append(AttentionBlocks(pattern, Tokens(spans[0]), Tokens(spans[1])))
            continue
        if same:
            places = [(row, query, key) for _, query, key in places for row in range(rows)]
        row, query, key = torch.tensor(places, device="cpu").T[..., None]
        tokens = [
            Tokens(
                slice(0), upload(row * length + start + torch.arange(count, device="cpu"), device)
            )
            for start, count in ((query, queries), (key, keys))
        ]
        blocks.append(AttentionBlocks(pattern, *tokens))
    return tuple(blocks)


def _pieces(low: torch.Tensor, high: torch.Tensor) -> Iterator[tuple[Pattern, int, int, int, int]]:
    """Yield pattern, first query, queries, first key, keys of the blocks of one row."""
    for start, end, grows in _runs(low, high):
        first, last = int(low[start]), int(high[start])
        if first >= last:
            continue
        lower, upper = divmod(grows, 2)
        # a band of constant width is divided, so that the two squares in it do not overlap
        most = max(1, last - first - 1) if lower and upper else end - start
        for query in range(start, end, most):
            count = min(most, end - query)
            begin, stop = first + lower * (query - start), last + upper * (query - start)
            if upper:
                stop -= 1
                yield Pattern.CAUSAL, query, count, stop, count
            if lower and begin < stop:
                yield Pattern.REVERSED, query, count, begin, count
                begin += count
            if begin < stop:
                yield Pattern.FULL, query, count, begin, stop - begin


def _runs(low: torch.Tensor, high: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield first token, last token + 1, and 2 x the growth of ``low`` + that of ``high`` from
    token to token, of runs of tokens where the growth is constant, 0 or 1.
    """
    lower, upper = low.diff(), high.diff()
    empty = low >= high
    is_plain = (lower | upper) >> 1 == 0  # 0 or 1
    codes = torch.where(is_plain & (empty[1:] == empty[:-1]), 2 * lower + upper, -1)
    values, counts = torch.unique_consecutive(codes, return_counts=True)
    start = step = 0
    for code, count in zip(values.tolist(), counts.tolist()):
        step += count
        if code < 0:
            yield from ((token, token + 1, 0) for token in range(start, step))
            start = step
        elif start < step:
            yield start, step + 1, code
            start = step + 1
    if start < len(low):
        yield start, len(low), 0
