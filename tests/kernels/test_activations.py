"""GELU with a bias, SwiGLU and GeGLU: kernels against their references, and both against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_zero.errors import KernelError
from hf_zero.ops import activations
from hf_zero.ops import activations_reference as reference
from hf_zero.ops.activations import geglu, geglu_packed, gelu, swiglu, swiglu_packed
from tests.helpers.errors_beside_torch import assert_no_worse_than_torch, gradients

pytestmark = pytest.mark.usefixtures("checked_triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("shape", [(3, 2, 8), (9, 521), (1, 3000)])
def test_gelu_with_a_bias(body, shape, approximate, dtype):
    x, bias = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_no_worse_than_torch(
        lambda x, bias: gelu(x, bias, approximate=approximate),
        lambda x, bias: F.gelu(x + bias, approximate=approximate),
        [x, bias],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", FORMS)
def test_gelu_without_a_bias(body, approximate, dtype):
    x = (3 * torch.randn(5, 433)).to(dtype)
    assert_no_worse_than_torch(
        lambda x: gelu(x, approximate=approximate),
        lambda x: F.gelu(x, approximate=approximate),
        [x],
    )


GATES = {
    "silu": (swiglu, swiglu_packed, F.silu),
    "gelu_tanh": (geglu, geglu_packed, lambda x: F.gelu(x, approximate="tanh")),
    "gelu": (
        lambda gate, up: geglu(gate, up, approximate="none"),
        lambda gate_up: geglu_packed(gate_up, approximate="none"),
        F.gelu,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", GATES)
def test_gates(body, act, dtype):
    gated, _, plain = GATES[act]
    gate, up = (3 * torch.randn(2, 5, 433)).to(dtype), torch.randn(2, 5, 433).to(dtype)
    assert_no_worse_than_torch(gated, lambda gate, up: plain(gate) * up, [gate, up])


@pytest.mark.parametrize("width", [8, 433])
@pytest.mark.parametrize("act", GATES)
def test_packed_gates_are_the_gates_of_the_halves(body, act, width):
    gated, packed, _ = GATES[act]
    gate_up = torch.randn(2, 3, 2 * width, dtype=torch.bfloat16)
    whole = gradients(packed, [gate_up])
    halves = gradients(lambda gate_up: gated(*gate_up.chunk(2, dim=-1)), [gate_up])
    assert all(torch.equal(one, other) for one, other in zip(whole, halves))


def test_strided_inputs_and_gradients(body):
    """Views of a wider tensor, a transposed one, one row expanded; an expanded gradient."""
    wide = torch.randn(6, 40)
    row = torch.randn(1, 16).expand(6, 16)
    for gate, up in (
        (wide[:, 3:19], wide[:, 20:36]),
        (torch.randn(16, 6).t(), row),
        (wide[::2, ::2], wide[1::2, 1::2]),
    ):
        assert_no_worse_than_torch(swiglu, lambda gate, up: F.silu(gate) * up, [gate, up])
        assert_no_worse_than_torch(gelu, lambda x, bias: F.gelu(x + bias), [gate, up[0]])
    x = torch.randn(6, 16, requires_grad=True)
    gelu(x).sum().backward()
    (want,) = torch.autograd.grad(F.gelu(x).sum(), x)
    assert torch.allclose(x.grad, want, atol=1e-6)


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


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_sigmoids_far_out(body, act):
    gated, _, plain = GATES[act]
    far = torch.tensor([-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4])
    value, slope, _ = gradients(gated, [far, torch.ones(7)], torch.ones(7))
    want, want_slope = gradients(plain, [far], torch.ones(7))
    assert torch.allclose(value, want, atol=1e-11) and torch.allclose(slope, want_slope, atol=1e-10)


@pytest.mark.parametrize("trains", [(True, False), (False, True)])
def test_what_does_not_train_gets_no_gradient(body, trains):
    x, bias = torch.randn(5, 24, requires_grad=trains[0]), torch.randn(24, requires_grad=trains[1])
    gelu(x, bias).square().sum().backward()
    want = gradients(lambda x, bias: gelu(x, bias).square(), [x, bias], torch.ones(5, 24))
    assert (x.grad is not None, bias.grad is not None) == trains
    assert torch.equal(x.grad if trains[0] else bias.grad, want[1] if trains[0] else want[2])


def test_only_inputs_are_kept(body):
    kept: list[torch.Tensor] = []
    gate, up = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate, up)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8), (0,)])
def test_empty_inputs(body, shape):
    x, bias = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    (gelu(x, bias) + swiglu(x, x)).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(bias.grad, torch.zeros_like(bias))
    assert swiglu_packed(torch.randn(*shape[:-1], 2 * shape[-1])).shape == x.shape


def test_sums_over_many_rows_are_cut_into_strips(body, monkeypatch):
    triton_kernels = pytest.importorskip("hf_zero.ops.triton_kernels.activations")
    monkeypatch.setattr(triton_kernels, "PROGRAMS", 3)
    x, bias = torch.randn(70, 24), torch.randn(24)
    assert_no_worse_than_torch(gelu, lambda x, bias: F.gelu(x + bias), [x, bias])


def test_ops_are_registered_as_torch_wants_them(body):
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    ops = torch.ops.hf_zero
    for op, arguments in (
        (ops.bias_act, (x, bias, "gelu")),
        (ops.bias_act, (x, None, "gelu_tanh")),
        (ops.gated, (x, x.detach().clone(), "silu")),
        (ops.gated_packed, (x, "silu")),
        (ops.bias_act_backward, (x.detach(), x.detach(), bias.detach(), "gelu", True)),
        (ops.gated_backward, (x.detach(), x.detach(), x.detach(), "silu")),
        (ops.gated_packed_backward, (x.detach()[:, :4], x.detach(), "silu")),
    ):
        torch.library.opcheck(op.default, arguments)


def test_compiles_whole():
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def block(x, bias):
        return swiglu_packed(gelu(x, bias) * 2)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients(compiled, [x, bias]), gradients(block, [x, bias]))
    )


def test_bad_input_is_named():
    x = torch.randn(3, 8)
    for call, said in (
        (lambda: gelu(x.int()), "gelu: x is torch.int32; give one of"),
        (lambda: gelu(torch.tensor(1.0)), "gelu: x has no axis"),
        (lambda: gelu(x, torch.randn(7)), r"gelu: bias has shape \[7\] for an x of width 8"),
        (lambda: gelu(x, torch.randn(8, device="meta")), "gelu: bias is on meta and x on cpu"),
        (lambda: gelu(x, approximate="fast"), "gelu: approximate='fast'; give 'none' or 'tanh'"),
        (lambda: geglu(x, x, approximate="fast"), "geglu: approximate='fast'"),
        (lambda: swiglu(x, x[:2]), r"swiglu: gate has shape \[3, 8\] and up \[2, 8\]"),
        (
            lambda: swiglu(x, x.half()),
            "swiglu: gate is torch.float32 and up torch.float16; cast one",
        ),
        (lambda: swiglu_packed(x[:, :7]), "swiglu_packed: gate_up has width 7"),
    ):
        with pytest.raises(KernelError, match=said):
            call()


def test_examples_run(body):
    for kernel in (
        activations.BIAS_ACT,
        activations.BIAS_ACT_BACKWARD,
        activations.GATED,
        activations.GATED_BACKWARD,
    ):
        kernel(*kernel.example(torch.device("cpu")))
