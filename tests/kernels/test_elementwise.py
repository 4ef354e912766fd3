"""GELU with a bias, gated activations, dropout + residual and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_zero.ops import model_reference as reference
from hf_zero.ops.activations import geglu, geglu_packed, gelu, swiglu, swiglu_packed
from hf_zero.ops.philox import kept_rows
from hf_zero.ops.residual import dropout_add
from hf_zero.ops.rotary import rotary
from tests.helpers.errors_beside_torch import assert_no_worse_than_torch, gradients

pytestmark = pytest.mark.usefixtures("checked_triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMBER = 2026
# the seed that dropout_add draws after torch.manual_seed(NUMBER)
SEED = torch.randint(0, 2**31 - 1, (1,), generator=torch.Generator().manual_seed(NUMBER))
Function = Callable[..., torch.Tensor]


def dropped(x: torch.Tensor, dropout: float) -> torch.Tensor:
    """torch's formula with our mask."""
    kept = kept_rows(SEED, x.numel() // x.shape[-1], x.shape[-1], dropout).view(x.shape)
    return x * kept.to(x.dtype) / (1 - dropout)


def plain_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The formula of transformers, for any rotary width; the results side by side."""
    rotated = cos.shape[-1]
    results = []
    for x in (q, k):
        turned, rest = x[..., :rotated], x[..., rotated:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
        results.append(torch.cat((turned, rest), dim=-1))
    return torch.cat(results, dim=1)


def heads(
    batch: int, heads: int, sequence: int, width: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[batch, heads, sequence, width] as a view of a projection's output."""
    return torch.randn(batch, sequence, heads, width).to(dtype).transpose(1, 2)


class Row(NamedTuple):
    """An operator, torch's formula, and the shapes of the inputs; the first is spread wider."""

    ours: Function
    torchs: Function
    shapes: tuple[tuple[int, ...], ...]


def biased(shape: tuple[int, ...], approximate: str) -> Row:
    return Row(
        lambda x, bias: gelu(x, bias, approximate=approximate),
        lambda x, bias: F.gelu(x + bias, approximate=approximate),
        (shape, shape[-1:]),
    )


def added(shape: tuple[int, ...], dropout: float) -> Row:
    def ours(x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(NUMBER)
        return dropout_add(x, others, dropout=dropout, training=True)

    return Row(ours, lambda x, others: others + dropped(x, dropout), (shape, shape))


GATES: dict[str, tuple[Function, Function, Function]] = {
    "silu": (swiglu, swiglu_packed, F.silu),
    "gelu_tanh": (geglu, geglu_packed, lambda x: F.gelu(x, approximate="tanh")),
    "gelu": (
        lambda gate, up: geglu(gate, up, approximate="none"),
        lambda gate_up: geglu_packed(gate_up, approximate="none"),
        F.gelu,
    ),
}


def gated(act: str) -> Row:
    ours, _, plain = GATES[act]
    return Row(ours, lambda gate, up: plain(gate) * up, ((2, 5, 433), (2, 5, 433)))


def packed(act: str) -> Row:
    _, ours, plain = GATES[act]
    return Row(ours, lambda x: plain(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], ((2, 3, 2 * 433),))


def alone(approximate: str) -> Row:
    ours, torchs = (lambda x, of=of: of(x, approximate=approximate) for of in (gelu, F.gelu))
    return Row(ours, torchs, ((5, 433),))


FORMS = ("none", "tanh")
ROWS = {
    **{
        f"gelu {form}, bias, {shape}": biased(shape, form)
        for form in FORMS
        for shape in [(3, 2, 8), (9, 521), (1, 3000)]
    },
    **{f"gelu {form}": alone(form) for form in FORMS},
    **{f"gate {act}": gated(act) for act in GATES},
    **{f"packed gate {act}": packed(act) for act in GATES},
    **{
        f"dropout {dropout}, {shape}": added(shape, dropout)
        for dropout in (0.0, 0.1)
        for shape in [(2, 3, 8), (9, 1025), (1, 300)]
    },
    "dropout 0.4": added((7, 433), 0.4),
}


def test_is_no_worse_than_torch(body: str) -> None:
    """Inputs are contiguous, views of wider tensors, or transposed ones, in turn."""
    for number, (name, row) in enumerate(ROWS.items()):
        dtype = DTYPES[number % len(DTYPES)]
        inputs = []
        for shape in row.shapes:
            wide = torch.randn(*shape[:-1], shape[-1] + 7).to(dtype)[..., 3 : shape[-1] + 3]
            transposed = wide.t().contiguous().t() if wide.dim() == 2 else wide
            laid_out = (wide.contiguous(), wide, transposed)
            inputs.append(laid_out[number // 2 % 3])
        inputs[0].mul_(3)
        compared(f"{name}, {dtype}", row.ours, row.torchs, inputs)


def compared(name: str, ours: Any, torchs: Any, inputs: list[torch.Tensor]) -> None:
    """A failure says ``name``."""
    try:
        assert_no_worse_than_torch(ours, torchs, inputs)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def test_exact_gelu_everywhere(body):
    """The fit of the tail: at most 1e-7 from x Φ(x), 3e-7 from its derivative, and zero far out."""
    x = torch.linspace(-12, 12, 8001)
    value, slope = gradients(gelu, [x], torch.ones(8001))
    true = x.double()
    want, want_slope = reference.activate(true, "gelu"), reference.derivative(true, "gelu")
    assert ((value - want).abs() <= 1e-7 * true.abs().clamp_min(1)).all()
    assert (slope - want_slope).abs().max() < 3e-7
    far = torch.tensor([-1e30, -1e4, -50.0, 50.0, 1e4, 1e30])
    assert gelu(far).tolist() == [0, 0, 0, 50, 1e4, float(far[-1])]
    assert gelu(torch.tensor([float("nan")])).isnan().all()
    x.requires_grad_()
    gelu(x).sum().backward()  # whose gradient is expanded
    assert torch.equal(x.grad, slope)


def test_what_is_dropped_and_what_is_kept(body):
    ones, zeros = torch.ones(40, 50), torch.zeros(40, 50)
    for dropout, values in ((0.5, {0.0, 2.0}), (1.0, {0.0})):
        kept = dropout_add(ones, zeros, dropout=dropout, training=True)
        assert {*kept.unique().tolist()} == values
    x, others = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(dropout_add(x, others, dropout=0.5), others + x), "nothing in evaluation"
    narrow, others = x.bfloat16().requires_grad_(), others.requires_grad_()
    torch.manual_seed(NUMBER)
    y = dropout_add(narrow, others, dropout=0.5, training=True)
    y.sum().backward()
    assert narrow.grad.dtype == torch.bfloat16
    assert {y.dtype, others.grad.dtype} == {torch.float32}
    assert torch.allclose(y, others + dropped(narrow.float(), 0.5))
    torch.manual_seed(NUMBER)
    dropout_add(x, others, dropout=0.5, training=True).sum().backward()
    assert torch.equal(others.grad, torch.full((3, 8), 2.0)), "where the residual alone trains"


def test_the_seed_comes_from_torchs_generator_and_a_checkpoint_replays_it(body):
    x, others = torch.randn(6, 40, requires_grad=True), torch.randn(6, 40)

    def block(x: torch.Tensor) -> torch.Tensor:
        return dropout_add(x, others, dropout=0.5, training=True).square()

    torch.manual_seed(5)
    plain = gradients(block, [x], torch.ones(6, 40))
    torch.manual_seed(5)
    again = gradients(lambda x: checkpoint(block, x, use_reentrant=False), [x], torch.ones(6, 40))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    assert not torch.equal(block(x), block(x))


# heads, key heads, width, rotary width, rows of angles; the angles' halves are not equal, which no
# model has and no kernel may rely on
SHAPES = [(4, 4, 16, 16, 1), (6, 2, 12, 12, 2), (3, 1, 10, 4, 1), (2, 2, 16, 6, 2)]


def test_rotary_is_the_formula(body):
    for number, (queries, keys, width, rotated, angles) in enumerate(SHAPES):
        dtype = DTYPES[number % len(DTYPES)]
        cos, sin = torch.randn(2, angles, 3, rotated).to(dtype)

        def theirs(q: torch.Tensor, k: torch.Tensor, cos=cos, sin=sin) -> torch.Tensor:
            return plain_rotary(q, k, cos.to(q.dtype), sin.to(q.dtype))

        def ours(q: torch.Tensor, k: torch.Tensor, cos=cos, sin=sin) -> torch.Tensor:
            return torch.cat(rotary(q, k, cos, sin), dim=1)

        name = f"{queries} + {keys} heads of {width}, {rotated} rotated, {dtype}"
        inputs = [heads(2, queries, 3, width, dtype), heads(2, keys, 3, width, dtype)]
        compared(name, ours, theirs, inputs)


def test_nothing_in_nothing_out(body):
    for shape in ((0, 8), (3, 0), (2, 0, 8), (0,)):
        x, bias = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
        drops = dropout_add(x, x.detach(), dropout=0.5, training=True) if shape[1:] else 0
        (gelu(x, bias) + swiglu(x, x) + drops).sum().backward()
        assert x.grad.shape == x.shape and torch.equal(bias.grad, torch.zeros_like(bias))
        assert swiglu_packed(torch.randn(*shape[:-1], 2 * shape[-1])).shape == x.shape
    for batch, sequence in ((0, 3), (2, 0)):
        q, angle = heads(batch, 2, sequence, 8).requires_grad_(), torch.randn(1, sequence, 8)
        torch.cat(rotary(q, q, angle, angle), dim=1).sum().backward()
        assert q.grad.shape == q.shape


def test_sums_over_many_rows_are_cut_into_strips(body, monkeypatch):
    kernels = pytest.importorskip("hf_zero.ops.triton_kernels.activations")
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    row = biased((70, 24), "none")
    assert_no_worse_than_torch(*row[:2], [torch.randn(shape) for shape in row.shapes])


def test_rotary_over_any_strides(body):
    """Contiguous heads, every second token, a width apart; angles expanded or strided."""
    cos, sin = torch.randn(1, 4, 32)[..., ::2], torch.randn(1, 4, 16).expand(2, 4, 16)
    for q, k in (
        (torch.randn(2, 4, 8, 16)[:, :, ::2], torch.randn(2, 4, 4, 24)[:, 1:3, :, 5:21]),
        (torch.randn(2, 4, 16, 4).transpose(2, 3), torch.randn(1, 1, 4, 16).expand(2, 3, 4, 16)),
    ):
        want = plain_rotary(q, k, cos.expand(2, 4, 16), sin)
        q_out, k_out = rotary(q, k, cos.expand(2, 4, 16), sin)
        assert torch.allclose(torch.cat((q_out, k_out), dim=1), want, atol=1e-6)
        assert q_out.transpose(1, 2).is_contiguous() and k_out.transpose(1, 2).is_contiguous()
    q, k = heads(1, 2, 3, 8).requires_grad_(), heads(1, 1, 3, 8).requires_grad_()
    rotary(q, k, torch.randn(1, 3, 8), torch.randn(1, 3, 8))[0].sum().backward()
    assert q.grad.abs().sum() > 0
    assert torch.equal(k.grad, torch.zeros_like(k)), "of a result that is not used"
