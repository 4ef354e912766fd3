"""The norms' kernels in the checked interpreter against their reference, and the operators
against torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_zero.errors import KernelError
from hf_zero.ops import norms
from tests.helpers.cells import fast

Checked = Callable[..., Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows × width: one row, fewer columns than lanes, a power of two, an odd width, several tiles per
# program.
SHAPES = [(1, 5), (13, 128), (3, 1000), (5, 1024)]


def strided(rows: int, width: int, dtype: torch.dtype, gap: int) -> torch.Tensor:
    return torch.randn(rows, width + gap).to(dtype)[:, :width]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {
        torch.float32: {"rtol": 2e-5, "atol": 2e-5},
        torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    }.get(dtype, {"rtol": 1.6e-2, "atol": 1.6e-2})


VARIANTS = [
    "layer",
    "rms",
    "layer of a sum",
    "rms of a sum",
    "dropout",
    "dropout, inverted",
    "no bias",
]
CELLS = list(itertools.product(VARIANTS, SHAPES, DTYPES))


def often(variant: str, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Types take turns."""
    return dtype == DTYPES[(VARIANTS.index(variant) + SHAPES.index(shape)) % len(DTYPES)]


@pytest.mark.parametrize("variant, shape, dtype", fast(CELLS, often), ids=str)
def test_kernels_are_their_reference(
    checked_triton: Checked, variant: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    centered, inverted, dropped = "rms" not in variant, "inverted" in variant, "dropout" in variant
    rows, width = shape
    gap = 3 if width % 2 else 8
    x = strided(rows, width, dtype, gap)
    residual = strided(rows, width, dtype, 0) if "sum" in variant or dropped else None
    weight = torch.randn(width).to(dtype) + 2
    bias = torch.randn(width).to(dtype) if centered and variant != "no bias" else None
    seed, rate = (torch.tensor([1234567]), 0.3) if dropped else (None, 0.0)
    keep = residual is not None and not inverted
    forward = (
        x,
        residual,
        weight,
        bias,
        seed,
        1e-5,
        0.0 if centered else 1.0,
        rate,
        centered,
        keep,
    )
    ours, expected = norms.NORM.launcher()(*forward), norms.NORM.reference(*forward)
    for name, one, other in zip(("y", "total", "mean", "rstd"), ours, expected, strict=True):
        torch.testing.assert_close(
            one, other, **tolerance(dtype), msg=lambda said, name=name: f"{name}: {said}"
        )

    y, total, mean, rstd = expected
    saved = y if inverted else x if residual is None else total
    dy, d_total = strided(rows, width, dtype, gap), strided(rows, width, dtype, 0) if keep else None
    backward = (
        dy,
        d_total,
        saved,
        weight,
        bias,
        mean,
        rstd,
        seed,
        forward[6],
        rate,
        centered,
        inverted,
        True,
        norms.TINY,
    )
    ours = norms.NORM_BACKWARD.launcher()(*backward)
    expected = norms.NORM_BACKWARD.reference(*backward)
    for name, one, other in zip(
        ("d_total", "dx", "d_weight", "d_bias"), ours, expected, strict=True
    ):
        torch.testing.assert_close(
            one, other, **tolerance(dtype), msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("rows", [1, 40, 700], ids=str)
def test_the_kernels_add_up_weights_over_programs_and_partial_sums(
    checked_triton: Checked, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """More programs than one tile of partial sums has, and more tiles than programs."""
    from hf_zero.ops.triton_kernels import norms as kernels

    monkeypatch.setattr(kernels, "PROGRAMS_WHERE_INTERPRETED", 40 if rows == 700 else 3)
    monkeypatch.setattr(kernels, "tile", lambda width, *, dropout: (16, 16, 4))
    dy = torch.randn(rows, 10)
    saved = torch.randn(rows, 10)
    weight = torch.randn(10)
    bias = torch.randn(10)
    arguments = (
        dy,
        None,
        saved,
        weight,
        bias,
        saved.mean(1),
        saved.std(1),
        None,
        0.0,
        0.0,
        True,
        False,
        True,
        norms.TINY,
    )
    for one, other in zip(
        norms.NORM_BACKWARD.launcher()(*arguments),
        norms.NORM_BACKWARD.reference(*arguments),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert torch.equal(
        norms.NORM_BACKWARD.launcher()(*arguments)[2], norms.NORM_BACKWARD.launcher()(*arguments)[2]
    )


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(checked_triton: Checked, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    weight = torch.ones(shape[-1], requires_grad=True)
    bias = torch.ones(shape[-1], requires_grad=True)
    with checked_triton() as settings:
        y, total = norms.add_layer_norm(x, x, weight, bias)
        (y.sum() + total.sum()).backward()
    assert settings.launches == 0 and y.shape == total.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


# name -> (ours, torch's, how many tensors of x's shape go in, whether there is a bias)
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, bool]] = {
    "rms_norm": (
        lambda x, w: norms.rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        1,
        False,
    ),
    "rms_norm, Gemma's": (
        lambda x, w: norms.rms_norm(x, w, 1e-6, offset=1.0),
        lambda x, w: (F.rms_norm(x.float(), w.shape, None, 1e-6) * (1 + w.float())).to(x.dtype),
        1,
        False,
    ),
    "layer_norm": (norms.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), 1, True),
    "layer_norm, inverted": (
        lambda x, w, b: norms.layer_norm(x, w, b, invertible=True),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        1,
        True,
    ),
    "add_rms_norm": (
        norms.add_rms_norm,
        lambda x, r, w: (F.rms_norm(x + r, w.shape, w, 1e-6), x + r),
        2,
        False,
    ),
    "add_layer_norm": (
        norms.add_layer_norm,
        lambda x, r, w, b: (F.layer_norm(x + r, w.shape, w, b), x + r),
        2,
        True,
    ),
    "layer_norm_of_sum": (
        norms.layer_norm_of_sum,
        lambda x, r, w, b: F.layer_norm(x + r, w.shape, w, b),
        2,
        True,
    ),
    "layer_norm_of_sum, inverted": (
        lambda x, r, w, b: norms.layer_norm_of_sum(x, r, w, b, invertible=True),
        lambda x, r, w, b: F.layer_norm(x + r, w.shape, w, b),
        2,
        True,
    ),
}


def outputs_and_gradients(
    operator: Callable[..., Any], inputs: list[torch.Tensor], outer: list[torch.Tensor]
) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    made = operator(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward(made, [each.to(out.dtype) for each, out in zip(outer, made)])
    return [*(each.detach() for each in made), *(leaf.grad for leaf in leaves)]


@pytest.mark.turns
@pytest.mark.parametrize("interpreted", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_as_exact_as_torch(
    checked_triton: Checked,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
    name: str,
    interpreted: bool,
) -> None:
    """fp32 as torch's; bf16 with at most 1.1 times the error that torch's own bf16 has against
    fp32.
    """
    monkeypatch.setenv("HF_ZERO_TRITON", "1" if interpreted else "0")
    ours, theirs, tensors, biased = OPERATORS[name]
    inputs = (
        [torch.randn(2, 24, 72) for _ in range(tensors)]
        + [torch.rand(72) + 0.5]
        + [torch.randn(72) / 8] * biased
    )
    outer = [torch.randn(2, 24, 72) for _ in range(2)]
    exact = outputs_and_gradients(theirs, inputs, outer)
    for one, other in zip(outputs_and_gradients(ours, inputs, outer), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=5e-5)

    rounded = [each.bfloat16() for each in inputs]
    exact = outputs_and_gradients(
        theirs, [each.float() for each in rounded], [each.bfloat16().float() for each in outer]
    )
    mine, torchs = (outputs_and_gradients(operator, rounded, outer) for operator in (ours, theirs))
    for index, (one, other, truth) in enumerate(zip(mine, torchs, exact, strict=True)):
        error, allowed = ((each.float() - truth).norm() / truth.norm() for each in (one, other))
        record_property(
            f"relative error of {index}, ours and torch's", (float(error), float(allowed))
        )
        assert error <= 1.1 * allowed + 1e-6, (index, float(error), float(allowed))


def test_the_formulas_are_derivatives() -> None:
    """In fp64, where the reference runs, against finite differences."""
    x, residual = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for operator in (
        lambda x, r, w, b: norms.add_layer_norm(x, r, w, b),
        lambda x, r, w, b: norms.layer_norm_of_sum(x, r, w, b, invertible=True),
        lambda x, r, w, b: norms.add_rms_norm(x, r, w, offset=1.0),
        lambda x, r, w, b: (norms.layer_norm(x, w, None), norms.rms_norm(r, w), b.sum()),
    ):
        assert torch.autograd.gradcheck(operator, (x, residual, weight, bias), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("invertible", [False, True])
def test_dropout_is_the_same_in_the_backward_and_when_recomputed(
    checked_triton: Checked, invertible: bool
) -> None:
    x, residual = torch.randn(64, 96, requires_grad=True), torch.randn(64, 96, requires_grad=True)
    weight, bias = torch.rand(96) + 0.5, torch.randn(96)

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return norms.layer_norm_of_sum(
            x, residual, weight, bias, dropout=0.25, training=True, invertible=invertible
        )

    outer = torch.randn(64, 96)
    torch.manual_seed(3)
    y = block(x, residual)
    plain = torch.autograd.grad(y, (x, residual), outer)
    torch.manual_seed(3)
    again = torch.autograd.grad(
        checkpoint(block, x, residual, use_reentrant=False), (x, residual), outer
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, again))
    kept = plain[0] != 0
    assert abs(kept.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(plain[0], torch.where(kept, plain[1] / 0.75, 0.0))
    expected = F.layer_norm(torch.where(kept, x / 0.75, 0.0) + residual, (96,), weight, bias)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(
        norms.layer_norm_of_sum(x, residual, weight, bias, dropout=0.25),
        norms.layer_norm_of_sum(x, residual, weight, bias),
    )


def test_only_the_gradients_that_are_asked_for_are_made(checked_triton: Checked) -> None:
    """A frozen norm under LoRA; a sum of which only one part, or one output, is used."""
    x, residual = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16)
    weight, bias = torch.ones(16), torch.zeros(16)
    y, total = norms.add_layer_norm(x, residual, weight, bias)
    (gradient,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, torch.ones_like(x))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(F.layer_norm(x + residual, (16,)).square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_what_is_inverted_keeps_its_output_alone() -> None:
    x = torch.randn(8, 16)
    residual = torch.randn(8, 16)
    weight = torch.ones(16, requires_grad=True)
    bias = torch.zeros(16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.append(each) or each, lambda each: each
    ):
        y = norms.layer_norm_of_sum(x, residual, weight, bias, invertible=True)
    assert [each.data_ptr() for each in kept if each.shape == x.shape] == [y.data_ptr()]


def test_a_weight_near_zero_is_where_inversion_ends(checked_triton: Checked) -> None:
    weight, bias = torch.full((16,), 1.0), torch.full((16,), 0.5)
    weight[3] = norms.TINY / 2
    weight.requires_grad_()
    x = torch.randn(8, 16, requires_grad=True)
    norms.layer_norm(x, weight, bias, invertible=True).sum().backward()
    assert weight.grad[3] == 0 and x.grad.isfinite().all()
    exact = torch.autograd.grad(F.layer_norm(x, (16,), weight, bias).sum(), weight)[0]
    others = torch.arange(16) != 3
    torch.testing.assert_close(weight.grad[others], exact[others], rtol=1e-3, atol=1e-4)


def test_parts_of_different_dtypes_are_promoted_as_torch_promotes(checked_triton: Checked) -> None:
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    residual = torch.randn(4, 16, requires_grad=True)
    weight, bias = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
    y, total = norms.add_layer_norm(x, residual, weight, bias, dropout=0.5, training=True)
    assert y.dtype == total.dtype == torch.float32
    (y * total).sum().backward()
    assert (x.grad.dtype, residual.grad.dtype, weight.grad.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


@pytest.mark.parametrize("inverted", [False, True])
def test_the_operators_are_whole(monkeypatch: pytest.MonkeyPatch, inverted: bool) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    seed = torch.tensor([5])
    torch.library.opcheck(
        norms._norm,
        (
            fresh(2, 3, 8),
            fresh(2, 3, 8),
            fresh(8),
            fresh(8),
            seed,
            1e-5,
            0.0,
            0.1,
            True,
            not inverted,
            inverted,
        ),
    )
    torch.library.opcheck(
        norms._norm,
        (fresh(3, 8), None, fresh(8), None, None, 1e-5, 1.0, 0.0, False, False, inverted),
    )
    if not inverted:
        saved = torch.randn(6, 8)
        parts = (
            saved,
            None,
            saved,
            saved[0],
            saved[1],
            saved.mean(1),
            saved.std(1),
            None,
            0.0,
            0.0,
            True,
            False,
            True,
        )
        torch.library.opcheck(norms._norm_backward, parts)


def test_a_compiled_model_has_them_in_one_graph() -> None:
    def model(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        y, total = norms.add_layer_norm(x, residual, weight, bias, dropout=0.1, training=False)
        return norms.rms_norm(y + total, weight, invertible=True)

    inputs = [torch.randn(4, 8), torch.randn(4, 8), torch.rand(8) + 1, torch.randn(8)]
    outer = [torch.randn(4, 8)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        outputs_and_gradients(compiled, inputs, outer),
        outputs_and_gradients(model, inputs, outer),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "x must be floating point"),
        ({"x": torch.ones(())}, "x must be floating point"),
        ({"weight": torch.ones(5)}, r"weight of a norm is \[5\].*must be \[4\]"),
        ({"bias": torch.ones(4, device="meta")}, "bias of a norm is on meta, x on cpu"),
        ({"residual": torch.ones(1, 4)}, r"residual of a norm is \[1, 4\]"),
        ({"dropout": 1.0}, r"dropout 1.0 of a norm: it must lie in \[0, 1\)"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], said: str) -> None:
    whole = {
        "x": torch.ones(2, 4),
        "residual": torch.ones(2, 4),
        "weight": torch.ones(4),
        "bias": torch.ones(4),
        **arguments,
    }
    with pytest.raises(KernelError, match=said):
        norms.add_layer_norm(**whole)


def test_rows_that_registers_do_not_hold_go_to_the_reference(checked_triton: Checked) -> None:
    for width, centered, dropout in ((16_385, False, 0.0), (8_193, True, 0.0), (4_097, True, 0.1)):
        x, weight = torch.randn(1, width, requires_grad=True), torch.ones(width)
        with checked_triton() as settings:
            if centered:
                y = norms.layer_norm_of_sum(
                    x, torch.zeros_like(x), weight, weight, dropout=dropout, training=True
                )
            else:
                y = norms.rms_norm(x, weight)
            y.sum().backward()
        assert settings.launches == 0
