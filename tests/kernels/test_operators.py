"""Operators as torch sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_zero.ops import (
    linear_cross_entropy,  # noqa: F401  # registers its operators
    masked_rows,
    norms,
    packed_linear,  # noqa: F401  # registers its operator
)
from hf_zero.ops.activations import gelu, swiglu_packed
from hf_zero.ops.flat_optimizers import FlatRun, RowSettings, Tiles, settings_table
from hf_zero.ops.norms import rms_norm
from hf_zero.ops.operators import operator
from hf_zero.ops.residual import dropout_add
from hf_zero.ops.rotary import rotary
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    sparse_attention,
)
from tests.helpers.cells import in_one_item
from tests.helpers.errors_beside_torch import gradients

OPS = torch.ops.hf_zero
SEED = torch.tensor([20_26])
Rows = list[tuple[Any, tuple[Any, ...]]]


def plain(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def trained(*shape: int) -> torch.Tensor:
    return plain(*shape).requires_grad_()


def of_elements() -> Rows:
    y, bias = plain(3, 8), plain(8)
    q, k, angle = plain(1, 2, 3, 8), plain(1, 1, 3, 8), plain(1, 3, 8)
    return [
        (OPS.bias_act, (trained(3, 8), trained(8), "gelu")),
        (OPS.bias_act, (trained(3, 8), None, "gelu_tanh")),
        (OPS.gated, (trained(3, 8), plain(3, 8), "silu")),
        (OPS.gated_packed, (trained(3, 8), "silu")),
        (OPS.bias_act_backward, (y, y, bias, "gelu", True)),
        (OPS.gated_backward, (y, y, y, "silu")),
        (OPS.gated_packed_backward, (y[:, :4], y, "silu")),
        (OPS.dropout_add, (trained(3, 8), plain(3, 8), SEED, 0.5)),
        (OPS.dropout_add, (plain(3, 8), trained(3, 8), SEED, 0.5)),
        (OPS.dropout_add_backward, (plain(3, 8), SEED, 0.5, torch.bfloat16)),
        (OPS.rotary, (trained(1, 2, 3, 8), trained(1, 1, 3, 8), angle, angle)),
        (OPS.rotary_backward, (q, k, angle, angle)),
    ]


def of_norms() -> Rows:
    both = (trained(2, 3, 8), trained(2, 3, 8), trained(8), trained(8), torch.tensor([5]))
    alone, saved = (trained(3, 8), None, trained(8), None, None), plain(6, 8)
    kept = (saved, saved, saved[0], saved[1], saved.mean(1), saved.std(1), None)
    return [
        (norms._norm, (*both, 1e-5, 0.0, 0.1, True, True)),
        (norms._norm, (*alone, 1e-5, 1.0, 0.0, False, False)),
        (norms._norm_backward, (*kept, 0.0, 0.0, True, True)),
    ]


def of_heads() -> Rows:
    head = (plain(12, 24), plain(101, 24), plain(101), torch.arange(12), -100)
    score = (plain(12), *head[:4], plain(12), -100, 5.0, 0.7, 5)
    return [
        (OPS.linear_cross_entropy, (*head, 0.1, 5.0, 0.7, 5, True, True, True)),
        (OPS.linear_log_probs, (*head, 5.0, 0.7, 5)),
        (OPS.linear_log_probs_backward, (*score, True, True, True)),
        (OPS.linear_log_probs_backward, (*score, False, True, False)),
        (masked_rows._select, (trained(23, 6), torch.arange(23) % 3 - 1, -1, 9)),
    ]


def of_linear_layers() -> Rows:
    sizes = (8, 4, 6)
    x, weights = plain(5, 12), [plain(n, 12) for n in sizes]
    backward = (plain(5, 18), x, weights)
    return [
        (
            OPS.packed_linear,
            (trained(5, 12), [trained(n, 12) for n in sizes], [trained(n) for n in sizes]),
        ),
        (OPS.packed_linear, (trained(5, 12), weights, [])),
        (OPS.packed_linear_backward, (*backward, True, True, True)),
        (OPS.packed_linear_backward, (*backward, False, True, False)),
    ]


def of_attention() -> Rows:
    handle, padding = FixedSparsityConfig(2).handle, torch.ones(1, 70, dtype=torch.bool)
    q, k, v = (trained(1, 2, 70, 16) for _ in range(3))
    return [
        (OPS.sparse_attention, (q, k, v, None, None, handle, True, 0.25, 0.0)),
        (OPS.sparse_attention, (q, k, v, padding, torch.tensor([3]), handle, True, 0.25, 0.1)),
    ]


def of_flats() -> Rows:
    table = settings_table([RowSettings(1e-3)], "cpu")
    rows: Rows = [
        (OPS.flat_advance_, (torch.zeros(1), table, None)),
        (OPS.flat_squared_norms, ([torch.ones(3), torch.ones(5)],)),
    ]
    coefficients = torch.ones(1, 16)
    tiles = Tiles.cut([FlatRun(20, 0, 0, 0, 0, 0)], "cpu", 16).table
    for out in (None, torch.full((20,), 7.0, dtype=torch.bfloat16)):
        shared = (out, tiles, coefficients, torch.tensor(2.0), torch.tensor(0.0), 16)
        arrays = [plain(20), plain(20), torch.zeros(20), torch.zeros(20)]
        rows += [
            (OPS.flat_adam_, (*arrays, *shared)),
            (OPS.flat_lion_, (*arrays[:3], *shared)),
        ]
    return rows


EVERY = (of_elements, of_norms, of_heads, of_linear_layers, of_attention, of_flats)
# "test_aot_dispatch_dynamic" takes a second each: blocks of models are compiled in their own tests.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_operators_keep_torchs_rules() -> None:
    for op, arguments in (row for rows in EVERY for row in rows()):
        try:
            op = getattr(op, "operator", op)
            whole = getattr(op, "default", op)
            torch.library.opcheck(whole, arguments, test_utils=CHECKS)
        except Exception as error:
            raise AssertionError(f"{op}: {error}") from error


def test_batched_gradients_are_those_of_each() -> None:
    x = trained(3, 8)
    out = swiglu_packed(x)
    batch = torch.eye(out.numel()).view(-1, *out.shape)
    (batched,) = torch.autograd.grad(out, x, batch, retain_graph=True, is_grads_batched=True)
    for row, grad in zip(batch, batched, strict=True):
        assert torch.equal(*torch.autograd.grad(out, x, row, retain_graph=True), grad)


def test_kernels_read_no_view_that_negates() -> None:
    negated: list[bool] = []

    @operator("hf_zero_tests::negated")
    def read(x: torch.Tensor) -> torch.Tensor:
        negated.append(x.is_neg())
        return x.clone()

    view = torch.complex(plain(8), plain(8)).conj().imag
    assert view.is_neg()
    assert torch.equal(read(view), -plain(8))
    assert negated == [False]


ANGLE = plain(1, 3, 8)
LAYOUT = BigBirdSparsityConfig(2, 16, attention="unidirectional")


def elements(qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.unflatten(2, (4, 8)).transpose(1, 2).split([2, 1, 1], dim=1)
    turned = torch.cat((*rotary(q, k, ANGLE, ANGLE), v), dim=1)
    x = swiglu_packed(gelu(turned, bias) * 2)
    return dropout_add(F.relu(x), x, dropout=0.5, training=True)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sparse_attention(q, k, v, LAYOUT) * 2


def drawing(x: torch.Tensor) -> torch.Tensor:
    return dropout_add(x, x, dropout=0.5, training=True)


BLOCKS: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = [
    (elements, [plain(1, 3, 32), plain(8)]),
    (attention, [plain(1, 2, 70, 16) for _ in range(3)]),
]


@in_one_item(BLOCKS, lambda row: row[0].__name__)
def test_a_block_compiles_whole_to_the_same_numbers(row: tuple[Any, list[torch.Tensor]]) -> None:
    block, inputs = row
    close = {"rtol": 0.0, "atol": 0.0} if block is elements else {"rtol": 1e-5, "atol": 1e-6}
    compiled, found = torch.compile(block, fullgraph=True, backend="aot_eager"), []
    for each in (compiled, block):
        torch.manual_seed(5)
        found.append(gradients(each, inputs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_a_seed_is_drawn_in_the_graph() -> None:
    torch.compile(drawing, fullgraph=True, backend="aot_eager")(plain(3, 8))


def test_the_short_way_has_no_second_derivative_either() -> None:
    x, weight = trained(3, 8), trained(8)
    (grad,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_backward"):
        grad.sum().backward()
