"""Expressions: each range that is read is that range of the same torch operation, and
``sliceable`` says what reading costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.loading import expressions
from hf_zero.loading.expressions import (
    Cast,
    Computed,
    Expression,
    InFile,
    InMemory,
    Joined,
    Strided,
    strided_like,
)
from tests.loading.comparing import assert_reads, assert_same
from tests.loading.counting import counting

SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 3), (1, 6, 1), (2, 3, 4), (3, 5, 2, 2)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]

Pair = tuple[Expression, torch.Tensor]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 5).to(dtype)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    """A tensor of every shape and dtype, in a file."""
    torch.manual_seed(0)
    tensors = {f"{shape} {dtype}": values(shape, dtype) for shape in SHAPES for dtype in DTYPES}
    path = tmp_path_factory.mktemp("stored") / "model.safetensors"
    save_file(tensors, path)
    with TensorFile(path) as file:
        yield [(InFile(file, name), tensor) for name, tensor in tensors.items()]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "the same": lambda t: t.view(t.shape),
    "flat": lambda t: t.reshape(-1),
    "reversed dimensions": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "a half": lambda t: t.reshape(-1)[t.numel() // 2 :],
    "every second": lambda t: t.reshape(-1)[1::2],
    "last of the last dimension": lambda t: t.select(-1, -1) if t.dim() and t.shape[-1] else t,
    "repeated": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "windows": lambda t: t.reshape(-1).unfold(0, 3, 2) if t.numel() > 2 else t,
    "diagonal": lambda t: t.diagonal() if t.dim() > 1 else t,
}


def viewed(pair: Pair, view: Callable[[Any], Any]) -> Pair:
    expression, tensor = pair
    return strided_like(
        expression, view(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    ), view(tensor)


@pytest.mark.turns
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_a_file_and_one_in_memory(
    stored: list[Pair], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    expression, tensor = stored[SHAPES.index(shape) * len(DTYPES) + DTYPES.index(dtype)]
    assert_reads(expression, tensor)
    assert_reads(InMemory(tensor), tensor)
    assert_reads(
        InMemory(tensor.t() if tensor.dim() == 2 else tensor),
        tensor.t() if tensor.dim() == 2 else tensor,
    )


@pytest.mark.turns
@pytest.mark.parametrize("run_bytes", [1, 4096])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_read_by_runs_and_gathered(
    stored: list[Pair], view: Callable[[Any], Any], run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "RUN_BYTES", run_bytes)
    for pair in stored:
        assert_reads(*viewed(pair, view))


@given(
    data=st.data(), run_bytes=st.sampled_from([1, 8, 4096]), block=st.sampled_from([1, 3, 1 << 20])
)
@settings(max_examples=60, deadline=None)
def test_nested_expressions(
    stored: list[Pair], data: st.DataObject, run_bytes: int, block: int
) -> None:
    kept = expressions.RUN_BYTES, expressions.BLOCK
    expressions.RUN_BYTES, expressions.BLOCK = run_bytes, block
    try:
        pair = data.draw(st.sampled_from(stored))
        for _ in range(data.draw(st.integers(1, 5))):
            pair = grown(pair, data)
        assert_reads(*pair)
    finally:
        expressions.RUN_BYTES, expressions.BLOCK = kept


def grown(pair: Pair, data: st.DataObject) -> Pair:
    """An expression over ``pair``, and the same of torch."""
    expression, tensor = pair
    kind = data.draw(st.sampled_from(["view", "join", "cast", "compute"]))
    if kind == "view" or tensor.numel() > 500:
        return viewed(pair, data.draw(st.sampled_from(list(VIEWS.values()))))
    if kind == "join" and tensor.dim():
        dim = data.draw(st.integers(0, tensor.dim() - 1))
        other = viewed(pair, lambda t: t.narrow(dim, 0, t.shape[dim] // 2))
        parts = data.draw(st.permutations([pair, other, (InMemory(tensor), tensor)]))
        return Joined([part for part, _ in parts], dim), torch.cat([part for _, part in parts], dim)
    if kind == "cast" and not tensor.is_complex():
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        return Cast(expression, dtype), tensor.to(dtype)
    return Computed(tensor.shape, tensor.dtype, lambda: expression.whole().clone(), "clone"), tensor


def test_a_view_of_everything_is_the_expression_itself(stored: list[Pair]) -> None:
    expression, tensor = stored[-1]
    assert strided_like(expression, torch.empty(tensor.shape, device="meta")) is expression
    assert isinstance(strided_like(expression, torch.empty(tensor.numel(), device="meta")), Strided)


# -- what reading costs ----------------------------------------------------------------------------

ROWS, COLUMNS = 64, 1024  # rows of 4096 bytes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    torch.manual_seed(1)
    tensors = {f"t{index}": torch.randn(ROWS, COLUMNS) for index in range(4)}
    path: Path = tmp_path_factory.mktemp("large") / "model.safetensors"
    save_file(tensors, path)
    with TensorFile(path) as file:
        yield [(InFile(file, name), tensor) for name, tensor in tensors.items()]


def joined(pairs: list[Pair], dim: int) -> Pair:
    return Joined([part for part, _ in pairs], dim), torch.cat([part for _, part in pairs], dim)


def casted(pair: Pair, dtype: torch.dtype) -> Pair:
    return Cast(pair[0], dtype), pair[1].to(dtype)


def flipped(pair: Pair) -> Pair:
    return Computed((ROWS, COLUMNS), torch.float32, lambda: pair[0].whole().flip(0), "flip"), pair[
        1
    ].flip(0)


IN_PART: dict[str, Callable[[list[Pair]], Pair]] = {
    "renamed": lambda t: t[0],
    "cast": lambda t: casted(t[0], torch.bfloat16),
    "flat": lambda t: viewed(t[0], lambda x: x.view(-1)),
    "rows": lambda t: viewed(t[0], lambda x: x[5:31]),
    "every third row": lambda t: viewed(t[0], lambda x: x[::3]),
    "rows in another order": lambda t: viewed(
        t[0], lambda x: x.view(8, 4, 2, COLUMNS).transpose(1, 2)
    ),
    "one row repeated": lambda t: viewed(t[0], lambda x: x[3:4].expand(20, COLUMNS)),
    "joined by rows": lambda t: joined(t, 0),
    "joined by columns": lambda t: joined(t, 1),
    "a chunk of joined ones": lambda t: viewed(joined(t, 0), lambda x: x.chunk(3)[1]),
    "joined chunks": lambda t: joined([viewed(each, lambda x: x.chunk(4)[2]) for each in t], 0),
}
WHOLE: dict[str, Callable[[list[Pair]], Pair]] = {
    "transposed": lambda t: viewed(t[0], lambda x: x.t()),
    "columns": lambda t: viewed(t[0], lambda x: x[:, :1000]),
    "cast after a transposition": lambda t: casted(viewed(t[0], lambda x: x.t()), torch.bfloat16),
    "joined transpositions": lambda t: joined([viewed(each, lambda x: x.t()) for each in t], 1),
    "rows of joined transpositions": lambda t: viewed(
        joined([viewed(each, lambda x: x.t()) for each in t], 1), lambda x: x[::2]
    ),
    "joined by few columns": lambda t: joined(
        [viewed(each, lambda x: x.view(-1, 4)) for each in t], 1
    ),
    "computed": lambda t: flipped(t[0]),
    "rows of computed ones": lambda t: viewed(flipped(t[0]), lambda x: x[::3]),
    "joined by columns that are computed": lambda t: joined([flipped(each) for each in t], 1),
}


@pytest.mark.parametrize("build", IN_PART.values(), ids=IN_PART.keys())
def test_what_is_sliceable_is_read_in_part(
    large: list[Pair], build: Callable[[list[Pair]], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "BLOCK", 1000)
    expression, tensor = build(large)
    assert expression.sliceable
    flat, numel = tensor.reshape(-1), tensor.numel()
    for first, last in [
        (0, numel),
        (0, numel // 4),
        (numel // 4 + 17, numel // 2 + 5),
        (numel - 3, numel),
    ]:
        out = torch.empty(last - first, dtype=tensor.dtype)
        with counting() as read:
            expression.read(first, out)
        assert_same(out, flat[first:last])
        assert read.bytes == (last - first) * 4  # the file holds fp32


@pytest.mark.parametrize("build", WHOLE.values(), ids=WHOLE.keys())
def test_what_is_not_sliceable_is_read_once_as_a_whole(
    large: list[Pair], build: Callable[[list[Pair]], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "BLOCK", 1000)
    expression, tensor = build(large)
    assert not expression.sliceable
    with counting() as read:
        assert_same(expression.whole().contiguous(), tensor.contiguous())
    sources = 4 if "joined" in next(name for name, each in WHOLE.items() if each is build) else 1
    assert read.bytes == sources * ROWS * COLUMNS * 4
    quarter = torch.empty(tensor.numel() // 4, dtype=tensor.dtype)
    with counting() as read:
        expression.read(0, quarter)
    assert_same(quarter, tensor.reshape(-1)[: quarter.numel()])
    assert read.bytes > 2 * quarter.numel() * 4  # the flag is not false for nothing
