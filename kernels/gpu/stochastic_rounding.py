"""fp32 rounded to bf16 stochastically, by a hash of the key and of the index of each element.

Roofline. Bound by memory: 4 bytes read and 2 written an element, about 20 integer operations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_zero.ops.reference import key_words

TILE, WARPS = 1024, 4
SPAN = 1 << 32  # elements with the same words of the key


# Grid: tiles. ``first``: the lower 32 bits of the index of element 0; no index exceeds them.
@triton.jit(do_not_specialize=["a", "b", "first"])
def stochastic_round_kernel(out, source, numel, a, b, first, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    bits = tl.load(source + at, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
    x = (first + at).to(tl.uint32) ^ a.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ b.to(tl.uint32)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.where(magnitude >= 0x7F800000, bits, bits + (x & 0xFFFF)) >> 16
    rounded = tl.where(magnitude > 0x7F800000, (bits >> 16) | 0x40, rounded)
    tl.store(out + at, rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)


def round_(out: Tensor, source: Tensor, key: int, first: int) -> None:
    at, numel = 0, source.numel()
    while at < numel:
        upper, low = divmod(first + at, SPAN)
        count = min(numel - at, SPAN - low)
        stochastic_round_kernel[(triton.cdiv(count, TILE),)](
            out[at:], source[at:], count, *key_words(key, upper), low, TILE, num_warps=WARPS
        )
        at += count
