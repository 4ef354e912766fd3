"""Bit for bit, whatever the dtype; and every range of the elements, not only the whole."""

from __future__ import annotations

import torch

from hf_zero.loading.expressions import Expression


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(found) is torch.Tensor
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(bits(found), bits(expected))


def ranges(numel: int) -> list[tuple[int, int]]:
    """All ranges of few elements; of more, those with ends near the start, the middle and the
    end.
    """
    ends = (
        range(numel + 1)
        if numel <= 8
        else sorted({0, 1, 2, numel // 3, numel // 2, numel // 2 + 1, numel - 2, numel - 1, numel})
    )
    return [(start, stop) for start in ends for stop in ends if start <= stop]


def assert_reads(expression: Expression, expected: torch.Tensor) -> None:
    """``expression`` is ``expected``: as a whole and in every range."""
    assert (expression.shape, expression.dtype, expression.numel) == (
        tuple(expected.shape),
        expected.dtype,
        expected.numel(),
    )
    assert_same(expression.whole().contiguous(), expected.contiguous())
    flat = expected.reshape(-1)
    for start, stop in ranges(flat.numel()):
        out = torch.full((stop - start,), 77).to(expected.dtype)
        expression.read(start, out)
        assert torch.equal(bits(out), bits(flat[start:stop])), (start, stop)
