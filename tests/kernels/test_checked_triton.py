"""The checked interpreter finds the faults that the interpreter alone lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")
import triton.language as tl  # noqa: E402

from tests.helpers import checked_triton as harness  # noqa: E402
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
def product(x, y, out, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION))


@triton.jit
def follow(table, out):
    source = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0), tl.load(source))


def test_accesses_outside_name_the_argument(checked_triton: Checked) -> None:
    """A neighbor in the same buffer and a gap between the rows of a view are outside, too."""
    x, y = torch.ones(16), torch.zeros(16)
    copy[(1,)](x, y, 16, 0, BLOCK=16, POISONED=False)
    assert torch.equal(x, y)
    for at, shift in ((16, 1), (-1, -1), (2**33, 2**33)):
        said = f"load out of bounds of 'x', in program 0: .*element {at}"
        with pytest.raises(MemoryFault, match=said):
            copy[(1,)](x, y, 16, shift, BLOCK=16, POISONED=False)
    buffer = torch.zeros(32)
    with pytest.raises(MemoryFault, match=r"load out of bounds of 'x'.*element 16"):
        copy[(1,)](buffer[:16], buffer[16:], 16, 4, BLOCK=16, POISONED=False)
    with pytest.raises(MemoryFault, match="store out of bounds of 'y'"):
        copy[(1,)](buffer[:16], buffer[16:24], 16, 0, BLOCK=16, POISONED=False)
    with pytest.raises(MemoryFault, match=r"'x'.*gap between rows"):
        copy[(1,)](torch.ones(3, 16)[:, :8], torch.zeros(16), 16, 0, BLOCK=16, POISONED=False)


def test_lanes_masked_without_other_and_memory_of_empty_are_nan(checked_triton: Checked) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = torch.zeros(16, dtype=dtype)
        copy[(1,)](torch.ones(16, dtype=dtype), y, 11, 0, BLOCK=16, POISONED=True)
        assert torch.equal(y[:11], torch.ones(11, dtype=dtype)) and y[11:].isnan().all()
    whole = torch.zeros(16, dtype=torch.int32)
    copy[(1,)](torch.ones_like(whole), whole, 11, 0, BLOCK=16, POISONED=True)
    assert (whole[11:] == torch.iinfo(torch.int32).max // 2).all()
    assert torch.empty(7).isnan().all()
    assert torch.empty_like(torch.ones(7, dtype=torch.bfloat16)).isnan().all()


def test_programs_run_in_another_order_and_race_where_they_meet(checked_triton: Checked) -> None:
    x = torch.arange(4.0)
    stores = "race: a store of program 0 and a store of program 1 meet at element 0 of 'total'"
    with pytest.raises(MemoryFault, match=stores):
        add_up[(4,)](x, torch.zeros(1), ATOMIC=False)
    total = torch.zeros(1)
    add_up[(4,)](x, total, ATOMIC=True)
    assert total.item() == 6
    loads = "race: a load of program 1 and a store of program 0 meet at element 1 of 'x'"
    with pytest.raises(MemoryFault, match=loads):
        pass_on[(2,)](torch.zeros(3))
    pass_on[(1,)](torch.zeros(3))
    collide[(1,)](torch.ones(8), torch.zeros(4), BLOCK=8)
    with pytest.raises(MemoryFault, match="two lanes of one store"):
        collide[(1,)](torch.arange(8.0), torch.zeros(4), BLOCK=8)
    # what a counter says depends on the programs before: no race, but wrong for a result
    orders = []
    for settings in ({"order": "forward"}, {"order": "reverse"}, {"seed": 0}, {"seed": 1}):
        seen = torch.zeros(8, dtype=torch.int32)
        with harness.checked_triton(**settings):
            count[(8,)](torch.zeros(1, dtype=torch.int32), seen)
        orders.append(seen.tolist())
    assert orders[0] == orders[1][::-1] == [*range(8)]
    assert orders[2] != orders[3] and all(sorted(each) == orders[0] for each in orders[2:])


def test_addresses_from_a_table_lead_only_to_tensors_that_are_named(checked_triton):
    sources = [torch.full((1,), 2.0), torch.full((1,), 3.0)]
    table, out = torch.tensor([each.data_ptr() for each in sources]), torch.zeros(2)
    with pytest.raises(MemoryFault, match="no tensor named to reachable"):
        follow[(2,)](table, out)
    with checked_triton() as settings:
        settings.reachable(*sources)
        follow[(2,)](table, out)
    assert out.tolist() == [2.0, 3.0]
