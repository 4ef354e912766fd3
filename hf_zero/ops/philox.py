"""The random numbers of dropout masks: Philox-4x32-10 as Triton's ``tl.randint4x`` draws it, in
plain torch.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a 64-bit key,
the seed, and a 128-bit counter into four 32-bit words. A mask need not be saved: the backward draws
it again from the seed. :func:`kept_rows` uses all four words, one for each of four consecutive
rows, and compares the words themselves: ten rounds and a conversion for each element, as in
``tl.rand``, are more than a memory-bound kernel has time for.
"""

from __future__ import annotations

from functools import partial

import torch

from hf_zero.ops.dispatch import Kernel

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_LOW = 0xFFFFFFFF
ROUNDS = 10
_MULTIPLY = 0xD2511F53, 0xCD9E8D57
_RAISE = 0x9E3779B9, 0xBB67AE85


def draw_seed(device: torch.device) -> torch.Tensor:
    """Draw a seed from torch's generator of ``device``; it stays on the device: int64 [1].

    It is replayed wherever torch replays its random state.
    """
    return torch.randint(0, 2**31 - 1, (1,), device=device, dtype=torch.int64)


def kept_rows(seed: torch.Tensor, rows: int, width: int, dropout: float) -> torch.Tensor:
    """Return the mask of the elements that dropout keeps, bool [rows, width]: their word is at
    least ``dropout * 2**32``, with dropout in fp32.

    The word of an element is word ``row % 4`` of ``tl.randint4x(seed, row // 4 * width + column)``,
    unsigned.
    """
    return _words(seed, rows, width) >= int(
        torch.tensor(dropout, dtype=torch.float32, device="cpu").double() * 2**32
    )


def _words(seed: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    fours = -(-rows // 4)
    counters = torch.arange(fours * width, device=seed.device, dtype=torch.int64)
    # [fours, 4, width]
    words = torch.stack([word.view(fours, width) for word in _philox(seed, counters)], dim=1)
    return words.view(fours * 4, width)[:rows]


def _philox(seed: torch.Tensor, counters: torch.Tensor) -> Words:
    """Return four words of 32 bits for each counter below 2**63, in int64."""
    nothing = torch.zeros_like(counters)
    return words((counters & _LOW, (counters >> 32) & _LOW, nothing, nothing), seed)


def words(counter: Words, seed: torch.Tensor, rounds: int = ROUNDS) -> Words:
    """Return Philox-4x32 of ``counter``, four words of 32 bits in int64 tensors of one shape, with
    the 64 bits of ``seed`` as its key.
    """
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high0, low0 = _product(_MULTIPLY[0], c0)
        high1, low1 = _product(_MULTIPLY[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & _LOW for key, step in zip(keys, _RAISE)]
    return c0, c1, c2, c3


def first_words(
    seed: int, counter: tuple[int, int, int], count: int, device: torch.device
) -> torch.Tensor:
    """Return the first words of the counters (i, *counter), i below ``count``: int64 [count], in
    one launch on a GPU. The host does not wait.
    """
    out = torch.empty(count, dtype=torch.int64, device=device)
    FIRST_WORDS(out, seed, *counter)
    return out


def _first_words_reference(out: torch.Tensor, seed: int, *counter: int) -> None:
    # created on the device: copying a number there would make the host wait
    full = partial(torch.full, (), dtype=torch.int64, device=out.device)
    index = torch.arange(out.numel(), dtype=torch.int64, device=out.device)
    drawn = words((index, *(full(w & _LOW).expand_as(index) for w in counter)), full(seed))  # type: ignore[arg-type]
    out.copy_(drawn[0])


def _example(device: torch.device) -> tuple[object, ...]:
    return torch.empty(40, dtype=torch.int64, device=device), 7, 1, 2, 3


FIRST_WORDS = Kernel("philox_words", "philox:first_words", _first_words_reference, example=_example)


def _product(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of ``factor * word``, whose 64 bits would overflow int64."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
