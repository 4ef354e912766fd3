"""The sums of squares of gradients on a device without a kernel for them."""

from __future__ import annotations

import pytest
import torch

from hf_zero.zero.reduce.norm import RUN, _sums_over_runs

SIZES = (0, 1, 5, RUN - 1, RUN, RUN + 1, 3 * RUN, 7 * RUN + 11)


def one_by_one(grad: torch.Tensor) -> torch.Tensor:
    """The squares of norms over runs, each cast to fp64."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(run, dtype=wide).double() for run in grad.split(RUN)]
    return torch.stack(norms).square().sum() if grad.numel() else torch.zeros(()).double()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_a_sum_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    together, want = _sums_over_runs(grads), [one_by_one(grad) for grad in grads]
    assert torch.equal(torch.stack(together), torch.stack(want))
    for grad, found in zip(grads, together):
        assert torch.equal(_sums_over_runs([grad])[0], found)
    grads[3][2] = float("inf")
    assert torch.stack(_sums_over_runs(grads)).isfinite().tolist() == [n != 3 for n in range(8)]
