"""The norms' kernels, compiled, at the sizes of real models; tests/kernels/test_norms.py runs
them in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_zero.ops import dispatch, norms

GPU = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16]
# BERT's rows, a Llama's, GPT-2 XL's odd width, Qwen3's heads, the widest there are, and one that no
# access of 16 bytes fits.
SHAPES = [(4096, 1024), (4096, 768), (2048, 4096), (1024, 1600)]
SHAPES += [(65_536, 128), (512, 8192), (4097, 1023)]


@pytest.fixture(autouse=True)
def every_kernel_compiled() -> Any:
    yield
    assert dispatch.broken() == {}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (64, 16_384)], ids=str)
@pytest.mark.parametrize("variant", ["layer", "rms", "layer of a sum", "dropout"])
def test_kernels_are_their_reference(variant, shape, dtype):
    centered, dropped = variant != "rms", variant == "dropout"
    rows, width = shape
    widest = norms.WIDEST_CENTERED if centered else norms.WIDEST
    if width > (norms.WIDEST_WITH_DROPOUT if dropped else widest):
        pytest.skip("goes to the reference")
    x, weight = drawn(rows, width, dtype=dtype), drawn(width, dtype=dtype) / 4 + 1
    residual = drawn(rows, width, dtype=dtype) if "sum" in variant or dropped else None
    bias = drawn(width, dtype=dtype) / 4 if centered else None
    seed, rate = (torch.tensor([987_654_321], device=GPU), 0.1) if dropped else (None, 0.0)
    keep = residual is not None
    forward = (x, residual, weight, bias, seed, 1e-6, 0.0, rate, centered, keep)
    close = {"rtol": 1.6e-2, "atol": 1e-2}
    if dtype == torch.float32:
        close = {"rtol": 1e-4, "atol": 1e-4}
    expected, ours = norms.NORM.reference(*forward), norms.NORM.launcher()(*forward)
    for name, one, other in zip(("y", "total", "mean", "rstd"), ours, expected, strict=True):
        told = lambda said, name=name: f"{name}: {said}"  # noqa: E731
        torch.testing.assert_close(one, other, **close, msg=told)
    _, total, mean, rstd = expected
    given = (drawn(rows, width, dtype=dtype), total if keep else x, weight, bias, mean, rstd, seed)
    backward = (*given, 0.0, rate, centered, True)
    ours = norms.NORM_BACKWARD.launcher()(*backward)
    expected = norms.NORM_BACKWARD.reference(*backward)
    names = ("d_total", "dx", "d_weight", "d_bias")
    for name, one, other in zip(names, ours, expected, strict=True):
        # Sums over rows: their error grows with the root of the rows, as their values do.
        root = rows**0.5 if "_w" in name or "_b" in name else 1.0
        limits = {"rtol": close["rtol"], "atol": close["atol"] * root}
        told = lambda said, name=name: f"{name}: {said}"  # noqa: E731
        torch.testing.assert_close(one, other, **limits, msg=told)
    again = norms.NORM_BACKWARD.launcher()(*backward)
    assert all(torch.equal(one, other) for one, other in zip(ours, again))


def relative_errors(
    ours: Callable[..., torch.Tensor],
    theirs: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
) -> list[tuple[float, float]]:
    """The bf16 errors against fp32 of ours and of torch's, of the output and each gradient."""

    def run(
        operator: Callable[..., torch.Tensor], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in tensors]
        y = operator(*leaves)
        y.backward(outer.to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    outer = torch.randn_like(inputs[0])
    exact = run(theirs, [each.float() for each in inputs])
    found = []
    for one, other, truth in zip(run(ours, inputs), run(theirs, inputs), exact, strict=True):
        errors = (float((each.float() - truth).norm() / truth.norm()) for each in (one, other))
        found.append(tuple(errors))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_is_as_exact_as_torch(shape: tuple[int, int]) -> None:
    rows, width = shape
    inputs = [drawn(rows, width, dtype=torch.bfloat16) for _ in range(2)]
    inputs += [(drawn(width) / 4 + 1).bfloat16(), drawn(width).bfloat16()]

    def layer(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x + r, w.shape, w, b)

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, w.shape, w, 1e-6)

    for ours, theirs, tensors in (
        (norms.layer_norm_of_sum, layer, inputs),
        (norms.rms_norm, rms, inputs[::2]),
    ):
        errors = relative_errors(ours, theirs, tensors)
        assert all(mine <= 1.1 * torchs + 1e-6 for mine, torchs in errors), errors


def test_a_tensor_with_more_than_2_31_elements() -> None:
    """64-bit offsets: the last rows are right too."""
    rows, width = 2**31 // 4096 + 64, 4096
    x = torch.randn(1, width, device=GPU, dtype=torch.bfloat16).expand(rows, width).contiguous()
    x[-1] *= 3
    x.requires_grad_()
    weight = torch.ones(width, device=GPU, dtype=torch.bfloat16)
    y = norms.rms_norm(x, weight)
    torch.testing.assert_close(y[-1], F.rms_norm(x[-1].detach(), (width,)), rtol=1.6e-2, atol=1e-2)
    outer = torch.zeros_like(y)
    outer[-1] = x[0].detach()
    (gradient,) = torch.autograd.grad(y, x, outer)
    last = x[-1].detach().requires_grad_()
    (expected,) = torch.autograd.grad(F.rms_norm(last, (width,)), last, outer[-1])
    torch.testing.assert_close(gradient[-1], expected, rtol=1.6e-2, atol=1e-2)
    assert not gradient[:-1].any()


def test_nothing_waits_for_the_gpu() -> None:
    x, residual = (drawn(256, 1024, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weight, bias = (
        torch.ones(1024, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )

    def step() -> None:
        told = {"dropout": 0.1, "training": True}
        norms.layer_norm_of_sum(x, residual, weight, bias, **told).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
