"""Momenta in one bit: what C loses, that error feedback loses nothing, and that the C++ and the
Triton kernels do as the reference does.
"""

from __future__ import annotations

import itertools
import math
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_zero.ops import sign_blocks_reference as plain
from hf_zero.ops.sign_blocks import BlockTable, SignBlocks
from tests.helpers.buffers import Guarded, same_bits

CHUNKS = (8, 32, 264, 2048, 40_008)
ONE, CPU = torch.ones(()), torch.device("cpu")


def spread(numel: int) -> Tensor:
    x = torch.randn(numel) * torch.randn(numel).exp()
    x[numel // 4 : numel // 3] = 0.0
    return x


def one(block: int, chunk: int, numel: int | None = None) -> BlockTable:
    """Blocks of one tensor in one chunk."""
    return SignBlocks(block).cut((0,), chunk if numel is None else numel, 1, chunk)


def messages_of(table: BlockTable) -> Tensor:
    """C of random numbers."""
    error, grad = torch.zeros(table.rows * table.chunk), spread(table.rows * table.chunk)
    out = table.empty(error.device)
    plain.compress(out, out.clone(), error, grad, 0.0, ONE, *table._form(CPU))
    return out


def same_messages(table: BlockTable, one: Tensor, other: Tensor, exact: bool) -> None:
    """Signs alike; scales alike, but for a sum's order in Triton. Unused bits may be any."""
    found = []
    for messages in (one, other):
        form, numel = table._form(CPU), table.rows * table.chunk
        said, ones = torch.zeros(numel), torch.ones(table.shape)
        plain.apply(said, messages, torch.zeros(numel, dtype=torch.int8), ones, -ones, *form)
        found.append(torch.cat([said, table.scales(messages).flatten()]))
    a, b = found
    assert same_bits(a.sign(), b.sign())
    assert same_bits(a, b) if exact else torch.allclose(a, b, rtol=2e-6, atol=0), table


def test_every_body_gives_what_the_reference_gives(every_body) -> None:
    """Tensors end at multiples of eight, and at any element."""
    exact, every = every_body != "triton", every_body not in ("triton", "reference")
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16])
    for block, chunk in itertools.product((32, 256, 2048), CHUNKS if every else (40, 2056)):
        cases = (
            (2, 0, (0, chunk // 16 * 8, chunk)),
            (3, 5, (0, 7, chunk // 2 + 3, chunk + 1, chunk + 1, 3 * chunk - 6)),
            (1, 0, (0,)),
            (3, chunk + 3, (0, chunk - 3)),
        )
        for rows, lacking, starts in cases[: 4 if exact else 2]:
            table = SignBlocks(block).cut(starts, rows * chunk - lacking, rows, chunk)
            assert table._form(CPU)[1] == (1 if lacking else 8)
            agrees(table, starts, next(dtypes), exact)


def agrees(table: BlockTable, starts: tuple[int, ...], dtype: torch.dtype, exact: bool) -> None:
    guarded, chunk, form = Guarded(), table.chunk, table._form(CPU)
    numel = table.rows * chunk

    def same(one: Tensor, other: Tensor) -> None:
        assert same_bits(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-5)

    error, grad = guarded(spread(numel)), guarded(spread(numel).to(dtype))
    momentum, factor = messages_of(table), torch.tensor(0.3)
    left, out = error.clone(), table.empty(CPU)
    plain.compress(out, momentum, left, grad, 0.9, factor, *form)
    sent = table.compress(error, grad, momentum, 0.9, factor)
    same_messages(table, sent, out, exact)
    same(error, left)

    own = table.row(table.rows - 1)
    mine, average = momentum[table.rows - 1 :].contiguous(), guarded(spread(chunk))
    kept, down = average.clone(), own.empty(CPU)
    plain.combine(down, out, mine, kept, 0.9, *own._form(CPU))
    result = own.combine(out, average, mine, 0.9)
    same_messages(own, result, down, exact)
    same(average, kept)

    weights = guarded(spread(numel))
    exponents = torch.randint(-126, 127, (numel,)).to(torch.int8)
    after, numbers = weights.clone(), table.numbers(starts)
    keep, step = torch.rand(2, len(starts))[:, numbers].view(2, *table.shape)
    plain.apply(after, momentum, exponents, keep, step, *form)
    table.apply(weights, momentum, exponents, keep, step)
    assert same_bits(weights, after), (chunk, table.rows)
    guarded.check()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=6).filter(any),
    st.integers(1, 4),
    st.sampled_from([32, 64]),
    st.integers(0, 2**31),
)
def test_each_tensor_has_scales_of_its_own(sizes, rows, block, seed):
    """The message of a tensor in a chunk is that of its elements alone, whatever lies beside."""
    numel, starts = sum(sizes), [0, *accumulate(sizes[:-1])]
    chunk = -(-numel // (8 * rows)) * 8
    table = SignBlocks(block).cut(starts, numel, rows, chunk)
    ends = [row * chunk + edge for row, edges in enumerate(table.edges.tolist()) for edge in edges]
    assert {start for start in starts if start < numel} <= {*ends}
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows * chunk, generator=generator)
    for number, (start, size) in enumerate(zip(starts, sizes)):
        z[start : start + size] *= 10.0 ** (3 * (number % 3))
    sent = table.compress(z.clone(), torch.zeros_like(z), table.empty(CPU), 0.0, ONE)
    said, seen = table.values(sent), 0
    for start, size in zip(starts, sizes):
        for row in range(rows):
            first, last = max(start, row * chunk), min(start + size, (row + 1) * chunk)
            if first >= last:
                continue
            part, padded = z[first:last], -(-(last - first) // 8) * 8
            alone = one(block, padded, last - first)
            held = torch.nn.functional.pad(part, (0, padded - len(part)))
            message = alone.compress(held, torch.zeros(padded), alone.empty(CPU), 0.0, ONE)
            assert same_bits(said[first:last], alone.values(message)[: last - first])
            seen += last - first
    assert seen == numel and not said[numel:].any()


def test_signs_and_scales(every_body) -> None:
    """Zero and minus zero are positive; the first of eight is the lowest bit."""
    table = one(32, 8)
    z = torch.tensor([0.0, -0.0, -1.0, 1.0, -1e-40, 1e-40, -3.0, 3.0])
    none = table.empty(CPU)
    message = table.compress(z.clone(), torch.zeros(8), none, 0.0, ONE)
    assert int(message[0, 0]) == 0b10101011
    size = math.sqrt(20 / 8)
    expected = torch.tensor([size, size, -size, size, -size, size, -size, size])
    torch.testing.assert_close(table.values(message), expected, rtol=1e-6, atol=0.0)
    zeros = table.compress(torch.zeros(8), torch.zeros(8), none, 0.0, ONE)
    assert not table.values(zeros).any()
    table, error = one(32, 32), torch.zeros(32)
    error[5] = 3.0
    message = table.compress(error, torch.zeros(32), table.empty(CPU), 0.0, ONE)
    assert table.values(message).tolist() == [2 * 3.0 / 32] * 32
    assert float(error.norm()) <= 3.0
    table, error = one(32, 64, 40), torch.full((64,), 2.0)
    message = table.compress(error, torch.zeros(64), table.empty(CPU), 0.0, ONE)
    assert table.values(message).tolist() == [2.0] * 40 + [0.0] * 24
    assert error.tolist() == [0.0] * 40 + [2.0] * 24  # and is not touched
    assert one(2048, 1 << 20).nbytes == (1 << 17) + (1 << 11)
    assert one(2048, 8).nbytes == 256 + 16
    # the second row has three tensors, the first one
    assert SignBlocks(32).cut((0, 70, 80), 120, 2, 64).shape == (2, 4)
