"""Expressions: each range that is read is that range of the same torch operation, and
``sliceable`` says what reading costs. Chains of operations: test_lazy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.loading import expressions
from hf_zero.loading.expressions import (
    Cast,
    Computed,
    Expression,
    InFile,
    Joined,
    strided_like,
)
from tests.loading.counting import counting

SHAPES = [(), (7,), (3, 0), (5, 3), (2, 3, 4)]
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64),
    *(torch.bool, torch.float8_e4m3fn, torch.complex64),
]
Pair = tuple[Expression, torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, whatever the dtype."""
    assert type(found) is torch.Tensor
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(bits(found), bits(expected))


def assert_reads(expression: Expression, expected: torch.Tensor) -> None:
    """``expression`` is ``expected``: as a whole, and in every range of few elements; of more, in
    those with ends near the start, the middle and the end.
    """
    numel = expected.numel()
    assert (expression.shape, expression.dtype) == (tuple(expected.shape), expected.dtype)
    assert expression.numel == numel
    assert_same(expression.whole().contiguous(), expected.contiguous())
    near = {0, 1, 2, numel // 3, numel // 2, numel // 2 + 1, numel - 2, numel - 1, numel}
    ends = range(numel + 1) if numel <= 8 else sorted(near)
    flat = expected.reshape(-1)
    for start, stop in ((start, stop) for start in ends for stop in ends if start <= stop):
        out = torch.full((stop - start,), 77).to(expected.dtype)
        expression.read(start, out)
        assert torch.equal(bits(out), bits(flat[start:stop])), (start, stop)


def viewed(pair: Pair, view: Callable[[Any], Any]) -> Pair:
    expression, tensor = pair
    shell = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return strided_like(expression, view(shell)), view(tensor)


ROWS, COLUMNS = 64, 1024  # rows of 4096 bytes


def joined(pairs: list[Pair], dim: int) -> Pair:
    return Joined([part for part, _ in pairs], dim), torch.cat([part for _, part in pairs], dim)


def casted(pair: Pair, dtype: torch.dtype) -> Pair:
    return Cast(pair[0], dtype), pair[1].to(dtype)


def flipped(pair: Pair) -> Pair:
    computed = lambda: pair[0].whole().flip(0)  # noqa: E731
    return Computed((ROWS, COLUMNS), torch.float32, computed, "flip"), pair[1].flip(0)


def turned(pairs: list[Pair]) -> Pair:
    return joined([viewed(each, lambda x: x.t()) for each in pairs], 1)


IN_PART: dict[str, Callable[[list[Pair]], Pair]] = {
    "cast": lambda t: casted(t[0], torch.bfloat16),
    "rows": lambda t: viewed(t[0], lambda x: x[5:31]),
    "every third row": lambda t: viewed(t[0], lambda x: x[::3]),
    "joined by rows": lambda t: joined(t, 0),
    "joined by columns": lambda t: joined(t, 1),
    "a chunk of joined ones": lambda t: viewed(joined(t, 0), lambda x: x.chunk(3)[1]),
}
# and how many tensors are read
WHOLE: dict[str, tuple[int, Callable[[list[Pair]], Pair]]] = {
    "transposed": (1, lambda t: viewed(t[0], lambda x: x.t())),
    "columns": (1, lambda t: viewed(t[0], lambda x: x[:, :1000])),
    "joined transpositions": (4, turned),
    "computed columns": (4, lambda t: joined([flipped(each) for each in t], 1)),
}


def test_what_is_sliceable_is_read_in_part_and_the_rest_once(tmp_path, monkeypatch):
    monkeypatch.setattr(expressions, "BLOCK", 1000)
    tensors = {f"t{index}": torch.randn(ROWS, COLUMNS) for index in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with TensorFile(tmp_path / "model.safetensors") as file:
        large: list[Pair] = [(InFile(file, name), tensor) for name, tensor in tensors.items()]
        for name, build in IN_PART.items():
            expression, tensor = build(large)
            assert expression.sliceable, name
            flat, numel = tensor.reshape(-1), tensor.numel()
            middle = (numel // 4 + 17, numel // 2 + 5)
            for first, last in [(0, numel), (0, numel // 4), middle, (numel - 3, numel)]:
                out = torch.empty(last - first, dtype=tensor.dtype)
                with counting() as read:
                    expression.read(first, out)
                assert_same(out, flat[first:last])
                assert read.bytes == (last - first) * 4, name  # the file holds fp32
        for name, (sources, build_whole) in WHOLE.items():
            expression, tensor = build_whole(large)
            assert not expression.sliceable, name
            with counting() as read:
                assert_same(expression.whole().contiguous(), tensor.contiguous())
            assert read.bytes == sources * ROWS * COLUMNS * 4, name
            quarter = torch.empty(tensor.numel() // 4, dtype=tensor.dtype)
            with counting() as read:
                expression.read(0, quarter)
            assert_same(quarter, tensor.reshape(-1)[: quarter.numel()])
            assert read.bytes > 2 * quarter.numel() * 4, name  # the flag is not false for nothing
