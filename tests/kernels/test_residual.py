"""Bias + dropout + residual: the kernel against its reference, and both against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_zero.errors import KernelError
from hf_zero.ops import residual
from hf_zero.ops.philox import kept_rows
from hf_zero.ops.residual import dropout_add
from tests.helpers.errors_beside_torch import assert_no_worse_than_torch, gradients

pytestmark = pytest.mark.usefixtures("checked_triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = torch.tensor([20_26])


def dropped(x: torch.Tensor, dropout: float) -> torch.Tensor:
    """torch's formula with our mask."""
    kept = kept_rows(SEED, x.numel() // x.shape[-1], x.shape[-1], dropout).view(x.shape)
    return x * kept.to(x.dtype) / (1 - dropout)


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2, 3, 8), (9, 1025), (1, 300)])
def test_with_a_bias(body, shape, dropout, dtype):
    x, others, bias = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )
    assert_no_worse_than_torch(
        lambda x, residual, bias: dropout_add(
            x, residual, bias, dropout=dropout, training=True, seed=SEED
        ),
        lambda x, residual, bias: residual + dropped(x + bias, dropout),
        [x, others, bias],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_bias(body, dtype):
    x, others = torch.randn(7, 433).to(dtype), torch.randn(7, 433).to(dtype)
    assert_no_worse_than_torch(
        lambda x, residual: dropout_add(x, residual, dropout=0.4, training=True, seed=SEED),
        lambda x, residual: residual + dropped(x, 0.4),
        [x, others],
    )


def test_kernel_and_reference_drop_the_same(monkeypatch):
    x, others = torch.randn(11, 1500), torch.randn(11, 1500)

    def results() -> list[torch.Tensor]:
        return gradients(
            lambda x, r: dropout_add(x, r, dropout=0.3, training=True, seed=SEED), [x, others]
        )

    ours = results()
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    assert all(torch.equal(kernel, reference) for kernel, reference in zip(ours, results()))
    assert 0.28 < (ours[1] == 0).float().mean() < 0.33


@pytest.mark.parametrize("dropout", [0.5, 1.0])
def test_what_is_dropped_and_what_is_kept(body, dropout):
    y = dropout_add(torch.ones(40, 50), torch.zeros(40, 50), dropout=dropout, training=True)
    assert set(y.unique().tolist()) == ({0.0, 2.0} if dropout < 1 else {0.0})


def test_nothing_is_dropped_in_evaluation(body):
    x, others, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    assert torch.allclose(dropout_add(x, others, bias, dropout=0.5), others + (x + bias))
    assert torch.equal(dropout_add(x, others, dropout=0.5), others + x)


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


def test_neither_mask_nor_activation_is_kept(body):
    kept: list[torch.Tensor] = []
    x, others = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        dropout_add(x, others, torch.randn(8), dropout=0.5, training=True)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.int64, 1)]


def test_dtypes_of_x_and_residual_may_differ(body):
    x, others = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(4, 8, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    y = dropout_add(x, others, bias, dropout=0.5, training=True, seed=SEED)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, others.grad.dtype, bias.grad.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert torch.allclose(y, others + dropped(x.float() + bias, 0.5))


def test_strided_inputs(body):
    wide = torch.randn(6, 40)
    for x, others in (
        (wide[:, 3:19], wide[:, 20:36]),
        (torch.randn(16, 6).t(), torch.randn(1, 16).expand(6, 16)),
    ):
        assert_no_worse_than_torch(
            lambda x, residual: dropout_add(x, residual, dropout=0.5, training=True, seed=SEED),
            lambda x, residual: residual + dropped(x, 0.5),
            [x, others],
        )


@pytest.mark.turns
@pytest.mark.parametrize(
    "trains", [(True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_does_not_train_gets_no_gradient(body, dropout, trains):
    inputs = [torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)]

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return dropout_add(*inputs, dropout=dropout, training=True, seed=SEED)

    wanted = gradients(function, inputs, torch.ones(5, 8))[1:]
    for each, train in zip(inputs, trains):
        each.requires_grad_(train)
    function(*inputs).sum().backward()
    for each, train, want in zip(inputs, trains, wanted):
        assert torch.equal(each.grad, want) if train else each.grad is None


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty_inputs(body, shape):
    x, bias = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    dropout_add(x, x.detach(), bias, dropout=0.5, training=True).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(bias.grad, torch.zeros_like(bias))


def test_sums_over_many_rows_are_cut_into_strips(body, monkeypatch):
    monkeypatch.setattr(
        pytest.importorskip("hf_zero.ops.triton_kernels.activations"), "PROGRAMS", 3
    )
    x, others, bias = torch.randn(70, 24), torch.randn(70, 24), torch.randn(24)
    assert_no_worse_than_torch(
        lambda x, residual, bias: dropout_add(
            x, residual, bias, dropout=0.5, training=True, seed=SEED
        ),
        lambda x, residual, bias: residual + dropped(x + bias, 0.5),
        [x, others, bias],
    )


def test_ops_are_registered_as_torch_wants_them(body):
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    forward, backward = (
        torch.ops.hf_zero.dropout_add.default,
        torch.ops.hf_zero.dropout_add_backward.default,
    )
    torch.library.opcheck(forward, (x, torch.randn(3, 8), bias, SEED, 0.5))
    torch.library.opcheck(forward, (x, torch.randn(3, 8), bias, None, 0.0))
    torch.library.opcheck(backward, (torch.randn(3, 8), SEED, 0.5, torch.float32, torch.float32))
    torch.library.opcheck(backward, (torch.randn(3, 8), SEED, 0.5, None, torch.float32))


def test_compiles_whole():
    x, bias = torch.randn(3, 8), torch.randn(8)

    def block(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return dropout_add(F.relu(x), x, bias, dropout=0.5, training=True, seed=SEED)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients(compiled, [x, bias]), gradients(block, [x, bias]))
    )
    torch.compile(
        lambda x: dropout_add(x, x, dropout=0.5, training=True), fullgraph=True, backend="aot_eager"
    )(x)


def test_bad_input_is_named():
    x = torch.randn(3, 8)
    for call, said in (
        (lambda: dropout_add(x, x[:2]), r"dropout_add: x has shape \[3, 8\] and residual \[2, 8\]"),
        (lambda: dropout_add(x.long(), x), "dropout_add: x is torch.int64"),
        (lambda: dropout_add(x, x, torch.randn(7)), r"bias has shape \[7\]"),
        (lambda: dropout_add(x, x, dropout=1.5), "dropout=1.5 is no probability"),
        (
            lambda: dropout_add(x, x, dropout=0.5, seed=torch.tensor(3)),
            r"seed is torch.int64 \[\] on cpu and x on cpu",
        ),
    ):
        with pytest.raises(KernelError, match=said):
            call()


def test_examples_run(body):
    for kernel in (residual.DROPOUT_ADD, residual.DROPOUT_ADD_BACKWARD):
        kernel(*kernel.example(torch.device("cpu")))
