"""The norms' kernels in the checked interpreter against their reference, and the operators
against torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_zero.ops import norms
from tests.helpers.cells import in_turn

Checked = Callable[..., Any]
Operation = Callable[..., torch.Tensor]
# rows, width: one row, fewer columns than lanes, a power of two, an odd width, several tiles per
# program
SHAPES = [(1, 5), (13, 128), (3, 1000), (5, 1024)]


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, w.shape, w, b)


def of_sum(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return layer(x + r, w, b)


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def gemmas(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (F.rms_norm(x.float(), w.shape, None, 1e-6) * (1 + w.float())).to(x.dtype)


# name -> (ours, torch's, how many tensors of x's shape go in, whether there is a bias)
OPERATORS: dict[str, tuple[Operation, Operation, int, bool]] = {
    "rms_norm, Gemma's": (partial(norms.rms_norm, eps=1e-6, offset=1.0), gemmas, 1, False),
    "layer_norm": (norms.layer_norm, layer, 1, True),
    "rms_norm": (norms.rms_norm, rms, 1, False),
    "layer_norm_of_sum": (norms.layer_norm_of_sum, of_sum, 2, True),
}


def output_and_gradients(
    operator: Operation, inputs: list[torch.Tensor], outer: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    made = operator(*leaves)
    return [made.detach(), *torch.autograd.grad(made, leaves, outer.to(made.dtype))]


@in_turn("name", OPERATORS)
def test_operators_are_as_exact_as_torch(checked_triton, monkeypatch, name):
    """Kernel and reference are alike, in views of a wider buffer, of shapes that take turns; both
    are as torch in fp32, and in bf16 within 1.1 times the error of torch's.
    """
    ours, theirs, tensors, biased = OPERATORS[name]
    shape = SHAPES[[*OPERATORS].index(name) % len(SHAPES)]
    width, gap = shape[1], 3 if shape[1] % 2 else 8
    inputs = [torch.randn(shape[0], width + gap)[:, :width] for _ in range(tensors)]
    inputs += [torch.randn(width) + 2, torch.randn(width)][: 1 + biased]
    outer = torch.randn(shape)
    for dtype, limit in ((torch.float32, 2e-5), (torch.float16, 2e-3)):
        given, found = [each.to(dtype) for each in inputs], []
        for interpreted in ("1", "0"):
            monkeypatch.setenv("HF_ZERO_TRITON", interpreted)
            found.append(output_and_gradients(ours, given, outer))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    rows = [torch.randn(2, 12, 72) for _ in range(tensors)]
    inputs = [*rows, torch.rand(72) + 0.5, torch.randn(72) / 8][: tensors + 1 + biased]
    outer = torch.randn(2, 12, 72)
    rounded = [each.bfloat16() for each in inputs]
    wide = [each.float() for each in rounded]
    whole = output_and_gradients(theirs, inputs, outer)
    exact = output_and_gradients(theirs, wide, outer.bfloat16().float())
    torchs = output_and_gradients(theirs, rounded, outer)
    for interpreted in ("1", "0"):
        monkeypatch.setenv("HF_ZERO_TRITON", interpreted)
        found = output_and_gradients(ours, inputs, outer)
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=5e-5)
        mine = output_and_gradients(ours, rounded, outer)
        for index, (one, other, truth) in enumerate(zip(mine, torchs, exact, strict=True)):
            error, allowed = ((x.float() - truth).norm() / truth.norm() for x in (one, other))
            assert error <= 1.1 * allowed + 1e-6, (index, float(error), float(allowed))


def test_the_kernels_add_up_weights_over_programs_and_partial_sums(checked_triton, monkeypatch):
    """More programs than one tile of partial sums has, and more tiles than programs."""
    from hf_zero.ops.triton_kernels import norms as kernels

    monkeypatch.setattr(kernels, "tile", lambda width, *, dropout: (16, 16, 4))
    for rows, programs in ((1, 3), (40, 3), (700, 40)):
        monkeypatch.setattr(kernels, "PROGRAMS_WHERE_INTERPRETED", programs)
        dy, saved = torch.randn(2, rows, 10)
        given = (dy, saved, *torch.randn(2, 10), saved.mean(1), saved.std(1), None)
        arguments = (*given, 0.0, 0.0, True, True)
        ours = norms.NORM_BACKWARD.launcher()(*arguments)
        for one, other in zip(ours, norms.NORM_BACKWARD.reference(*arguments), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        assert torch.equal(ours[2], norms.NORM_BACKWARD.launcher()(*arguments)[2])


def test_the_formulas_are_derivatives() -> None:
    """In fp64, where the reference runs, against finite differences."""
    x, residual = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for operator in (
        norms.layer_norm_of_sum,
        lambda x, r, w, b: norms.layer_norm_of_sum(x, r, w, None) + b,
        lambda x, r, w, b: norms.rms_norm(x, w, offset=1.0) * norms.layer_norm(r, w, b),
        lambda x, r, w, b: (norms.layer_norm(x, w, None), norms.rms_norm(r, w), b.sum()),
    ):
        given = (x, residual, weight, bias)
        assert torch.autograd.gradcheck(operator, given, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_dropout_is_the_same_in_the_backward_and_when_recomputed(checked_triton: Checked) -> None:
    x, residual = torch.randn(64, 96, requires_grad=True), torch.randn(64, 96, requires_grad=True)
    weight, bias, outer = torch.rand(96) + 0.5, torch.randn(96), torch.randn(64, 96)

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return norms.layer_norm_of_sum(x, residual, weight, bias, dropout=0.25, training=True)

    torch.manual_seed(3)
    y = block(x, residual)
    plain = torch.autograd.grad(y, (x, residual), outer)
    torch.manual_seed(3)
    again = checkpoint(block, x, residual, use_reentrant=False)
    again = torch.autograd.grad(again, (x, residual), outer)
    assert all(torch.equal(one, other) for one, other in zip(plain, again))
    kept = plain[0] != 0
    assert abs(kept.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(plain[0], torch.where(kept, plain[1] / 0.75, 0.0))
    expected = layer(torch.where(kept, x / 0.75, 0.0) + residual, weight, bias)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    evaluated = norms.layer_norm_of_sum(x, residual, weight, bias, dropout=0.25)
    assert torch.equal(evaluated, norms.layer_norm_of_sum(x, residual, weight, bias))


def test_rows_that_registers_do_not_hold(checked_triton: Checked) -> None:
    for width, centered, dropout in ((16_385, False, 0.0), (8_193, True, 0.0), (4_097, True, 0.1)):
        x, weight = torch.randn(1, width, requires_grad=True), torch.ones(width)
        told = {"dropout": dropout, "training": True}
        with checked_triton() as settings:
            if centered:
                y = norms.layer_norm_of_sum(x, torch.zeros_like(x), weight, weight, **told)
            else:
                y = norms.rms_norm(x, weight)
            y.sum().backward()
        assert settings.launches == 0


def test_the_input_of_the_norm_alone_is_kept(checked_triton: Checked) -> None:
    """A sum is, too, and written only where a backward may read it."""
    x, residual = (torch.randn(8, 16, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(2, 16)
    sizes: list[torch.Size] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda each: sizes.append(each.shape) or each, lambda each: each
    )
    for operator in (
        lambda: norms.rms_norm(x, weight),
        lambda: norms.layer_norm(x, weight, bias),
        lambda: norms.layer_norm_of_sum(x, residual, weight, bias, dropout=0.5, training=True),
    ):
        sizes.clear()
        with hooks:
            operator()
        assert sizes.count(x.shape) == 1
    given = (x, residual, weight, bias, None, 1e-5, 0.0, 0.0, True)
    assert [norms._norm(*given, keep)[1].numel() for keep in (True, False)] == [128, 0]
    assert not norms._norm(*given, True)[1].requires_grad  # it has no derivative
    with torch.no_grad():
        evaluated = norms.layer_norm_of_sum(x, residual, weight, bias)
    assert torch.equal(evaluated, norms.layer_norm_of_sum(x, residual, weight, bias))
