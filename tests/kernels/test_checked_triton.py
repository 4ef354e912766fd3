"""The checked interpreter: each fault it is there for is one that the interpreter alone lets
pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")
import triton.language as tl  # noqa: E402

from tests.helpers.checked_triton import MemoryFault  # noqa: E402

Checked = Callable[..., Any]


@triton.jit
def copy(x, y, n, shift, BLOCK: tl.constexpr, POISONED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if POISONED:
        values = tl.load(x + at + shift, mask=at < n)
    else:
        values = tl.load(x + at + shift, mask=at < n, other=0)
    tl.store(y + at, values)


@triton.jit
def copy_columns(x, y, stride, WIDTH: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, WIDTH)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def add_up(x, total, ATOMIC: tl.constexpr):
    value = tl.load(x + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(total, value)
    else:
        tl.store(total, tl.load(total) + value)


@triton.jit
def count(total, seen):
    tl.store(seen + tl.program_id(0), tl.atomic_add(total, 1))


@triton.jit
def pass_on(x):
    at = tl.program_id(0)
    tl.store(x + at + 1, tl.load(x + at))


@triton.jit
def collide(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at // 2, tl.load(x + at))


@triton.jit
def arithmetic(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a * b + a)
    tl.store(out + BLOCK + at, (tl.exp(a.to(tl.float32)) * b).to(tl.bfloat16))
    tl.store(out + 2 * BLOCK + at, tl.maximum(tl.where(a > b, -a, b), tl.abs(a)))


@triton.jit
def product(x, y, out, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION))


@triton.jit
def follow(table, out):
    source = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0), tl.load(source))


@pytest.mark.parametrize(
    ("shift", "place"), [(1, "element 16"), (-1, "element -1"), (2**33, f"element {2**33}")]
)
def test_a_load_outside_names_the_argument(checked_triton: Checked, shift: int, place: str) -> None:
    x, y = torch.ones(16), torch.zeros(16)
    copy[(1,)](x, y, 16, 0, BLOCK=16, POISONED=False)
    assert torch.equal(x, y)
    with pytest.raises(MemoryFault, match=f"load out of bounds of 'x', in program 0: .*{place}"):
        copy[(1,)](x, y, 16, shift, BLOCK=16, POISONED=False)


def test_a_neighbour_in_the_same_buffer_is_outside_too(checked_triton: Checked) -> None:
    buffer = torch.zeros(32)
    with pytest.raises(MemoryFault, match=r"load out of bounds of 'x'.*element 16"):
        copy[(1,)](buffer[:16], buffer[16:], 16, 4, BLOCK=16, POISONED=False)
    with pytest.raises(MemoryFault, match="store out of bounds of 'y'"):
        copy[(1,)](buffer[:16], buffer[16:24], 16, 0, BLOCK=16, POISONED=False)


def test_a_gap_between_the_rows_of_a_view_is_outside(checked_triton: Checked) -> None:
    x, y = torch.ones(3, 16)[:, :8], torch.zeros(3, 16)[:, :8]
    copy_columns[(3,)](x, y, 16, WIDTH=8)
    assert torch.equal(x, y)
    with pytest.raises(MemoryFault, match=r"'x'.*gap between rows"):
        copy_columns[(3,)](x, y, 16, WIDTH=16)


def test_lanes_masked_without_other_are_nan(checked_triton: Checked) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = torch.zeros(16, dtype=dtype)
        copy[(1,)](torch.ones(16, dtype=dtype), y, 11, 0, BLOCK=16, POISONED=True)
        assert torch.equal(y[:11], torch.ones(11, dtype=dtype)) and y[11:].isnan().all()
    whole = torch.zeros(16, dtype=torch.int32)
    copy[(1,)](torch.ones_like(whole), whole, 11, 0, BLOCK=16, POISONED=True)
    assert (whole[11:] == torch.iinfo(torch.int32).max // 2).all()


def test_memory_of_empty_is_nan(checked_triton: Checked) -> None:
    assert torch.empty(7).isnan().all()
    assert torch.empty_like(torch.ones(7, dtype=torch.bfloat16)).isnan().all()


def test_two_programs_that_store_to_one_address_race(checked_triton: Checked) -> None:
    x = torch.arange(4.0)
    with pytest.raises(
        MemoryFault,
        match="race: a store of program 0 and a store of program 1 meet at element 0 of 'total'",
    ):
        add_up[(4,)](x, torch.zeros(1), ATOMIC=False)
    total = torch.zeros(1)
    add_up[(4,)](x, total, ATOMIC=True)
    assert total.item() == 6


def test_a_program_that_loads_what_another_stores_races(checked_triton: Checked) -> None:
    with pytest.raises(
        MemoryFault,
        match="race: a load of program 1 and a store of program 0 meet at element 1 of 'x'",
    ):
        pass_on[(2,)](torch.zeros(3))
    pass_on[(1,)](torch.zeros(3))


def test_lanes_of_one_store_that_disagree_race(checked_triton: Checked) -> None:
    collide[(1,)](torch.ones(8), torch.zeros(4), BLOCK=8)
    with pytest.raises(MemoryFault, match="two lanes of one store"):
        collide[(1,)](torch.arange(8.0), torch.zeros(4), BLOCK=8)


def test_programs_run_in_another_order(checked_triton: Checked) -> None:
    """A program's reading of a counter depends on the programs before it: no race, but wrong if a
    result depends on it.
    """

    def order_of(**settings: Any) -> list[int]:
        seen = torch.zeros(8, dtype=torch.int32)
        with checked_triton(**settings):
            count[(8,)](torch.zeros(1, dtype=torch.int32), seen)
        return seen.tolist()

    assert order_of(order="forward") == list(range(8))
    assert order_of(order="reverse") == list(range(7, -1, -1))
    first, second = order_of(seed=0), order_of(seed=1)
    assert first != second and sorted(first) == sorted(second) == list(range(8)) != first


def test_bf16_is_rounded_as_torch_rounds(checked_triton: Checked) -> None:
    x, y = torch.randn(2, 1024).bfloat16()
    x[:4] = torch.tensor([float("inf"), float("nan"), 0.0, 1e-40])
    out = torch.empty(3, 1024, dtype=torch.bfloat16)
    with np.errstate(invalid="ignore"):
        arithmetic[(1,)](x, y, out, BLOCK=1024)
    torch.testing.assert_close(out[0], x * y + x, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        out[1], (x.float().exp() * y).bfloat16(), rtol=2**-8, atol=0, equal_nan=True
    )
    finite = ~x.isnan()
    assert torch.equal(out[2][finite], torch.maximum(torch.where(x > y, -x, y), x.abs())[finite])


def test_a_product_of_fp32_is_tf32_unless_told_otherwise(checked_triton: Checked) -> None:
    x, y, out = torch.randn(16, 16), torch.randn(16, 16), torch.empty(16, 16)
    exact = x.double() @ y.double()
    product[(1,)](x, y, out, PRECISION="ieee")
    assert (out - exact).abs().max() < 1e-5
    product[(1,)](x, y, out, PRECISION="tf32")
    assert 1e-4 < (out - exact).abs().max() < 2e-2
    half = x.bfloat16()
    product[(1,)](half, half, out, PRECISION="tf32")
    torch.testing.assert_close(out, half.float() @ half.float(), rtol=1e-5, atol=1e-5)


def test_addresses_from_a_table_lead_only_to_tensors_that_are_named(
    checked_triton: Checked,
) -> None:
    sources = [torch.full((1,), 2.0), torch.full((1,), 3.0)]
    table, out = torch.tensor([each.data_ptr() for each in sources]), torch.zeros(2)
    with pytest.raises(MemoryFault, match="no tensor named to reachable"):
        follow[(2,)](table, out)
    with checked_triton() as settings:
        settings.reachable(*sources)
        follow[(2,)](table, out)
    assert out.tolist() == [2.0, 3.0]


def test_everything_is_as_before_afterwards() -> None:
    from triton.runtime import interpreter

    from tests.helpers.checked_triton import checked_triton

    before = (
        interpreter._get_np_dtype,
        interpreter.GridExecutor.__call__,
        interpreter.InterpreterBuilder.create_dot,
    )
    with checked_triton():
        with checked_triton(order="reverse"):
            assert interpreter.GridExecutor.__call__ is not before[1]
        assert interpreter.GridExecutor.__call__ is not before[1]
    assert before == (
        interpreter._get_np_dtype,
        interpreter.GridExecutor.__call__,
        interpreter.InterpreterBuilder.create_dot,
    )
    assert not torch.are_deterministic_algorithms_enabled()
