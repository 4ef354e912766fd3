"""DeepSpeed's sparsity configurations: the blocks of keys that each block of queries attends to.

Each class describes a pattern and makes its layout for any length::

    layout = BigBirdSparsityConfig(num_heads=16, block=64).make_layout(4096)
    # int64 [16, 64, 64], 1 where a block is attended to

Patterns: Fixed and Variable after "Generating Long Sequences with Sparse Transformers"
(arXiv:1904.10509), BigBird (arXiv:2007.14062), Longformer by blocks (arXiv:2004.05150). Names,
defaults and meaning are those of ``deepspeed.ops.sparse_attention``, with three differences: random
blocks are drawn from a separate generator, seeded by ``seed``, so that all ranks and runs agree and
no global random state moves; in a unidirectional layout they are in the past, as many as there are;
and a sequence of fewer blocks than a pattern names is attended to whole, where DeepSpeed raises.

A configuration is immutable once it is made, because layouts compiled from it are kept. A subclass
that defines ``make_layout`` works like these.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import ConfigError, KernelError

from .sparsity_config import SparsityConfig


class DenseSparsityConfig(SparsityConfig):
    """A layout of all blocks: plain attention, for comparison."""

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        return torch.ones(blocks, blocks, dtype=torch.bool)


class FixedSparsityConfig(SparsityConfig):
    """Windows of ``num_local_blocks``, the last ``num_global_blocks`` of each being global.

    All (later) blocks attend to global blocks; with ``horizontal_global_attention`` global blocks
    attend to all as well. With ``num_different_global_patterns`` head ``h`` takes the ``h``-th
    group from the end of the window, modulo that number.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.attention = _direction(attention, horizontal_global_attention)
        self.horizontal_global_attention = horizontal_global_attention
        _check_counts(num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
        if num_global_blocks < 1 or num_local_blocks < 1 or num_local_blocks % num_global_blocks:
            raise KernelError(
                f"num_local_blocks is {num_local_blocks}, which must be a multiple of "
                f"num_global_blocks, {num_global_blocks}"
            )
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        most = num_local_blocks // num_global_blocks if different_layout_per_head else 1
        if not 1 <= num_different_global_patterns <= most:
            raise KernelError(
                f"num_different_global_patterns is {num_different_global_patterns}; it can be at "
                f"most {most}: one pattern without "
                "different_layout_per_head, else num_local_blocks / num_global_blocks"
            )
        self.num_different_global_patterns = num_different_global_patterns

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        window, width = self.num_local_blocks, self.num_global_blocks
        rows, columns = _grid(blocks)
        layout = rows // window == columns // window
        if self.attention == "unidirectional":
            layout = layout & (columns <= rows)
        first = window - (1 + head % self.num_different_global_patterns) * width
        whole = blocks - blocks % window
        starts = list(range(first, whole, window))
        if whole < blocks:  # the last window is short: its global blocks move to where they fit
            starts.append(max(0, min(whole + first, blocks - width)))
        spans = [(start, start + width) for start in starts]
        return layout | _globals(
            blocks, spans, self.attention, horizontal=self.horizontal_global_attention
        )


class VariableSparsityConfig(SparsityConfig):
    """Windows of the sizes ``local_window_blocks`` (the last one repeated), given global blocks,
    random blocks in each row.

    ``global_block_indices`` are single blocks, or with ``global_block_end_indices`` the starts of
    spans, whose (exclusive) ends those are. Negative ones count from the end of the sequence, as
    in slices of tensors.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.attention = _direction(attention, horizontal_global_attention)
        self.horizontal_global_attention = horizontal_global_attention
        self.num_random_blocks, self.seed = num_random_blocks, _check_seed(seed)
        _check_counts(num_random_blocks=num_random_blocks)
        if not local_window_blocks or any(
            not isinstance(size, int) or size < 1 for size in local_window_blocks
        ):
            raise KernelError(
                f"local_window_blocks is {list(local_window_blocks)}; give sizes of at least 1"
            )
        self.local_window_blocks = tuple(local_window_blocks)
        self.global_block_indices, self.global_block_end_indices = _spans_checked(
            global_block_indices, global_block_end_indices
        )

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        rows, columns = _grid(blocks)
        sizes = self.local_window_blocks
        ends = torch.tensor(sizes).cumsum(0)
        repeated = (torch.arange(blocks) - int(ends[-1])).div(
            sizes[-1], rounding_mode="floor"
        ) + len(sizes)
        window = torch.where(
            torch.arange(blocks) < ends[-1],
            torch.bucketize(torch.arange(blocks), ends, right=True),
            repeated,
        )
        layout = window[:, None] == window[None, :]
        if self.attention == "unidirectional":
            layout = layout & (columns <= rows)
        layout = layout | _random(blocks, self.num_random_blocks, self.attention, random)
        spans = _spans(self.global_block_indices, self.global_block_end_indices)
        return layout | _globals(
            blocks, spans, self.attention, horizontal=self.horizontal_global_attention
        )


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, ``num_global_blocks`` first rows and columns, and random blocks per row."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.attention = _direction(attention)
        self.num_random_blocks, self.seed = num_random_blocks, _check_seed(seed)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        _check_counts(
            num_random_blocks=num_random_blocks,
            num_sliding_window_blocks=num_sliding_window_blocks,
            num_global_blocks=num_global_blocks,
        )

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        layout = _sliding(blocks, self.num_sliding_window_blocks) | _random(
            blocks, self.num_random_blocks, self.attention, random
        )
        layout = layout | _globals(
            blocks, [(0, self.num_global_blocks)], "bidirectional", horizontal=True
        )
        return layout.tril() if self.attention == "unidirectional" else layout


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given global blocks in rows and columns."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.attention = _direction(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        _check_counts(num_sliding_window_blocks=num_sliding_window_blocks)
        self.global_block_indices, self.global_block_end_indices = _spans_checked(
            global_block_indices, global_block_end_indices
        )

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        spans = _spans(self.global_block_indices, self.global_block_end_indices)
        layout = _sliding(blocks, self.num_sliding_window_blocks) | _globals(
            blocks, spans, "bidirectional", horizontal=True
        )
        return layout.tril() if self.attention == "unidirectional" else layout


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """Only a sliding window."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        _check_counts(num_sliding_window_blocks=num_sliding_window_blocks)
        self.attention = _direction(attention)

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        layout = _sliding(blocks, self.num_sliding_window_blocks)
        return layout.tril() if self.attention == "unidirectional" else layout


class BlockLayout(SparsityConfig):
    """A layout given as a tensor [heads or 1, blocks, blocks]; nonzero blocks are attended to."""

    def __init__(self, layout: torch.Tensor, block: int, attention: str = "bidirectional") -> None:
        if layout.dim() != 3 or layout.shape[1] != layout.shape[2]:
            raise KernelError(
                f"a layout has the shape [heads, blocks, blocks], not {list(layout.shape)}"
            )
        super().__init__(layout.shape[0], block, different_layout_per_head=layout.shape[0] > 1)
        self.attention = _direction(attention)
        self.layout = (layout != 0).cpu()

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        if blocks != self.layout.shape[1]:
            raise KernelError(
                f"the layout has {self.layout.shape[1]} blocks of {self.block}, but the "
                f"sequence has {blocks}"
            )
        return self.layout[head]


class HeadsOf(SparsityConfig):
    """``heads`` of the heads of ``config``, from ``first`` on: those that a rank computes."""

    def __init__(self, config: SparsityConfig, first: int, heads: int) -> None:
        super().__init__(heads, config.block, different_layout_per_head=True)
        self.attention = config.attention
        self.config, self.first = config, first

    def make_layout(self, seq_len: int) -> torch.Tensor:
        return self.config.make_layout(seq_len)[self.first : self.first + self.num_heads]


def _grid(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(blocks)
    return index[:, None], index[None, :]


def _sliding(blocks: int, width: int) -> torch.Tensor:
    rows, columns = _grid(blocks)
    return (rows - columns).abs() <= width // 2


def _globals(
    blocks: int, spans: Sequence[tuple[int, int | None]], attention: str, *, horizontal: bool
) -> torch.Tensor:
    layout = torch.zeros(blocks, blocks, dtype=torch.bool)
    for start, end in spans:
        layout[0 if attention == "bidirectional" else start :, start:end] = True
        if horizontal:
            layout[start:end, :] = True
    return layout


def _random(blocks: int, count: int, attention: str, random: torch.Generator) -> torch.Tensor:
    """Return ``count`` different random columns in each row, of the past if unidirectional."""
    layout = torch.zeros(blocks, blocks, dtype=torch.bool)
    if not count:
        return layout
    count = min(count, blocks)
    # in fp32, whatever the default dtype is: all ranks and runs draw the same blocks
    drawn = torch.rand(blocks, blocks, generator=random, dtype=torch.float32)
    if attention == "unidirectional":
        drawn = drawn.masked_fill(torch.ones_like(layout).triu(1), 2.0)
    layout.scatter_(1, drawn.topk(count, dim=1, largest=False).indices, True)
    return layout.tril() if attention == "unidirectional" else layout


def _direction(attention: str, horizontal: bool = False) -> str:
    if attention not in ("unidirectional", "bidirectional"):
        raise KernelError(
            f'attention is {attention!r}; it must be "unidirectional" or "bidirectional"'
        )
    if horizontal and attention != "bidirectional":
        raise KernelError(
            "horizontal_global_attention would let blocks attend to the future; it needs "
            "bidirectional attention"
        )
    return attention


def _check_counts(**counts: int) -> None:
    """Raise KernelError for a number of blocks below 0, which a slice would count from the end."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise KernelError(f"{name} is {count!r}; write a number of blocks, at least 0")


def _check_seed(seed: int) -> int:
    if not isinstance(seed, int):
        raise KernelError(f"seed is {seed!r}; write an integer")
    return seed


def _spans_checked(
    starts: Sequence[int], ends: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    if not all(isinstance(block, int) for block in (*starts, *(ends or ()))):
        raise KernelError(
            f"global_block_indices {starts!r} and global_block_end_indices {ends!r} must be lists "
            "of integers"
        )
    if ends is None:
        return tuple(starts), None
    if len(starts) != len(ends) or not all(map(_is_span, starts, ends)):
        raise KernelError(
            f"global_block_indices {list(starts)} must be as many as global_block_end_indices "
            f"{list(ends)}, each below its end"
        )
    return tuple(starts), tuple(ends)


def _is_span(start: int, end: int) -> bool:
    """Return whether a slice from ``start`` to ``end`` has a block of some sequence."""
    return start >= 0 > end or start < end != 0


def _spans(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int | None]]:
    """Return the spans as the bounds of slices: -1 is the last block."""
    return list(zip(starts, ends if ends is not None else [start + 1 or None for start in starts]))


MODES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}


def from_section(section: Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """Build the configuration of a section such as ``{"mode": "bigbird", "block": 64, …}``.

    Without a mode it is "fixed", as in DeepSpeed. A key of another mode has no effect, because
    DeepSpeed's own example lists the keys of all modes; an unknown key or mode, and a value that
    the mode refuses, raise ConfigError.
    """
    mode = section.get("mode", "fixed")
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigError(
            f"sparse_attention.mode is {mode!r}; it must be one of {', '.join(MODES)}"
        )
    keys = {name for kind in MODES.values() for name in _parameters(kind)}
    unknown = [key for key in section if key not in keys and key != "mode"]
    if unknown:
        raise ConfigError(
            f"sparse_attention has no key {unknown[0]!r}; it has mode, {', '.join(sorted(keys))}"
        )
    taken = _parameters(MODES[mode])
    try:
        return MODES[mode](
            num_heads, **{key: value for key, value in section.items() if key in taken}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sparse_attention with mode {mode!r}: {error}") from error


def _parameters(kind: type[SparsityConfig]) -> list[str]:
    return [
        name
        for name in inspect.signature(kind.__init__).parameters
        if name not in ("self", "num_heads")
    ]
