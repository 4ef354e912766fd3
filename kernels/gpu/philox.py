"""The words of Philox-4x32-10, one an element.

Roofline. Bound by arithmetic: 10 rounds of 2 multiplications of 32 bits, about 100 operations for 8
bytes written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 512, 4


# Grid: blocks of ``out``. Element ``at`` of ``out`` gets the first word of the counter (at, c1, c2,
# c3).
@triton.jit(do_not_specialize=["seed", "c1", "c2", "c3"])
def first_words_kernel(out, seed, c1, c2, c3, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nothing = (at * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(
        seed,
        at.to(tl.uint32),
        nothing + c1.to(tl.uint32),
        nothing + c2.to(tl.uint32),
        nothing + c3.to(tl.uint32),
    )
    tl.store(out + at, word.to(tl.int64), mask=at < count)


def first_words(out: Tensor, seed: int, c1: int, c2: int, c3: int) -> None:
    grid = (triton.cdiv(out.numel(), BLOCK),)
    first_words_kernel[grid](out, seed, c1, c2, c3, out.numel(), BLOCK, num_warps=WARPS)
