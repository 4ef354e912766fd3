"""Sums of squares of many tensors in one pass: the kernel in the checked interpreter, its
reference, and fp64.
"""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.ops import flat_tiles as flat_norm
from hf_zero.ops.flat_tiles import RUN, squared_norm, squared_norms

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_tensors_of_one_buffer(dtype: torch.dtype, watched_body: str) -> None:
    buffer = torch.randn(RUN * 2 + 700).to(dtype)
    parts = [
        buffer[0:1],
        buffer[8 : RUN + 8],
        buffer[RUN + 9 : RUN * 2 + 100],
        buffer[5:5],
        buffer[-1:],
    ]
    got = squared_norms(parts)
    want = torch.stack([part.double().square().sum() for part in parts])
    torch.testing.assert_close(got, want, rtol=2e-7, atol=0)


def test_a_sum_depends_on_its_tensor_alone(watched_body: str) -> None:
    buffer = torch.randn(RUN + 500)
    alone = squared_norms([buffer[8 : RUN + 300]])
    other = torch.randn(50).bfloat16()
    beside = squared_norms([buffer[:8], other, buffer[8 : RUN + 300], torch.randn(30), other[3:20]])
    assert torch.equal(beside[2], alone[0])
    assert beside[1].item() == pytest.approx(other.double().square().sum().item(), rel=2e-7)
    assert beside[4].item() == pytest.approx(other[3:20].double().square().sum().item(), rel=2e-7)


def test_more_accurate_than_one_fp32_sum(watched_body: str, record_property) -> None:
    x = torch.randn(5 * RUN) + 3
    exact = x.double().square().sum().item()
    ours = abs(squared_norm(x)[0].item() / exact - 1)
    theirs = abs(x.square().cumsum(0)[-1].item() / exact - 1)
    record_property("relative error", f"{ours:.1e}, of one fp32 sum {theirs:.1e}")
    assert ours < 1e-7 and ours < theirs


@pytest.mark.parametrize("value", [1e30, 1e-30, 0.0])
def test_large_and_small_elements_count(value: float, watched_body: str) -> None:
    x = torch.full((100,), value)
    total, found = squared_norm(x)
    assert total.item() == pytest.approx(100 * x[0].double().item() ** 2, rel=1e-9)
    assert found.item() == 0.0


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_found(bad: float, dtype: torch.dtype, watched_body: str) -> None:
    x = torch.ones(300, dtype=dtype)
    x[-1] = bad
    total, found = squared_norm([torch.ones(3, dtype=dtype), x])
    assert found.item() == 1.0 and not total.isfinite()


def test_empty_tensors_sum_to_zero(watched_body: str) -> None:
    assert squared_norms([torch.ones(4), torch.empty(0), torch.empty(0, 3)]).tolist() == [
        4.0,
        0.0,
        0.0,
    ]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="there are no tensors"):
        squared_norms([])
    with pytest.raises(KernelError, match=r"tensor 1 is torch\.float64"):
        squared_norms([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    with pytest.raises(KernelError, match=r"tensor 0 has strides \(1, 2\)"):
        squared_norms([torch.ones(2, 2).t()])
    with pytest.raises(KernelError, match="tensor 1 is on meta and tensor 0 on cpu"):
        squared_norms([torch.ones(2), torch.ones(2, device="meta")])


def test_the_operator_is_well_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    torch.library.opcheck(
        torch.ops.hf_zero.flat_squared_norms.default, ([torch.ones(3), torch.ones(5)],)
    )


def test_tables_are_made_once() -> None:
    places = ((0, 40), (40, 24))
    assert flat_norm.run_tables(places, torch.device("cpu")) is flat_norm.run_tables(
        places, torch.device("cpu")
    )
