"""Linear layers of one input as one matrix product, over weights beside each other and apart."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_zero.errors import KernelError
from hf_zero.ops.packed_linear import adjacent, pack_, packed_linear
from tests.helpers.cells import in_one_item

OUTPUTS = (8, 4, 6)


def layers(
    dtype: torch.dtype = torch.float32, bias: bool = True, packed: bool = True
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    weights = [nn.Parameter(torch.randn(n, 12).to(dtype)) for n in OUTPUTS]
    biases = [nn.Parameter(torch.randn(n).to(dtype)) for n in OUTPUTS] if bias else []
    if packed:
        pack_(weights)
        pack_(biases)
    return weights, biases


def products(run: Callable[[], object]) -> int:
    """Matrix products that ``run`` asks torch for."""
    with patch("torch.mm", wraps=torch.mm) as mm, patch("torch.addmm", wraps=torch.addmm) as addmm:
        run()
    return mm.call_count + addmm.call_count


CELLS = [
    (torch.float32, True, True, (5, 12)),
    (torch.bfloat16, False, True, (2, 3, 12)),
    (torch.float32, False, False, (12,)),
    (torch.bfloat16, True, False, (5, 12)),
    (torch.float32, True, True, (12,)),
    (torch.float32, True, True, (2, 0, 12)),
]


@in_one_item(CELLS)
def test_is_each_layer_by_itself(cell):
    dtype, bias, packed, shape = cell
    weights, biases = layers(dtype, bias, packed)
    assert adjacent(weights) == packed
    x, results = torch.randn(shape).to(dtype), []
    for function in (
        lambda x: packed_linear(x, weights, biases or None).split(OUTPUTS, dim=-1),
        lambda x: [F.linear(x, w, b) for w, b in zip(weights, biases or [None] * 3)],
    ):
        leaf = x.clone().requires_grad_()
        outs = function(leaf)
        loss = sum(out.float().pow(2).sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(loss, [leaf, *weights, *biases])])
    close = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        close = {"rtol": 3e-2, "atol": 0.25}
    assert all(g.shape == w.shape and torch.allclose(g, w, **close) for g, w in zip(*results))


@pytest.mark.parametrize("bias", [True, False])
def test_layers_without_inputs_give_their_biases(bias):
    weights = [nn.Parameter(torch.zeros(n, 0)) for n in OUTPUTS]
    biases = [nn.Parameter(torch.randn(n)) for n in OUTPUTS] if bias else []
    x = torch.zeros(5, 0, requires_grad=True)
    outs = packed_linear(x, weights, biases or None).split(OUTPUTS, dim=-1)
    wanted = [b.expand(5, -1) for b in biases] if bias else [torch.zeros(5, n) for n in OUTPUTS]
    assert all(torch.equal(one, other) for one, other in zip(outs, wanted))
    sum(out.sum() for out in outs).backward()
    assert all(torch.equal(b.grad, torch.full_like(b, 5.0)) for b in biases)
    assert all(w.grad.shape == w.shape for w in weights) and x.grad.shape == x.shape


def test_beside_each_other_they_are_one_product_and_otherwise_go_the_plain_way():
    x = torch.randn(5, 12)
    weights, biases = layers()
    biases[1] = None
    with torch.autocast("cpu", torch.bfloat16):
        got = packed_linear(x, weights, biases).split(OUTPUTS, dim=-1)
        want = [F.linear(x, w, b) for w, b in zip(weights, biases)]
    for g, w in zip(got, want):
        assert g.dtype == torch.bfloat16 and torch.allclose(g, w, atol=0.1)
    got = packed_linear(x, weights, biases).split(OUTPUTS, dim=-1)
    for g, w, b in zip(got, weights, biases):
        assert torch.allclose(g, F.linear(x, w, b), atol=1e-5)
    apart, beside = layers(packed=False), layers()
    assert products(lambda: packed_linear(x, *beside)) == 1
    assert products(lambda: packed_linear(x, *apart)) == 3
    out = packed_linear(x.clone().requires_grad_(), *beside)
    assert products(lambda: out.sum().backward()) == 2, "one for x, one for all weights"


def test_packing_keeps_parameters_values_and_ties():
    model = nn.ModuleDict(
        {"q": nn.Linear(6, 4), "k": nn.Linear(6, 2), "tied": nn.Linear(6, 4, bias=False)}
    )
    model["tied"].weight = model["q"].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = [id(p) for p in model.parameters()]
    pack_([model["q"].weight, model["k"].weight], model)
    pack_([model["q"].bias, model["k"].bias], model)
    assert adjacent([model["q"].weight, model["k"].weight])
    assert adjacent([model["q"].bias, model["k"].bias])
    assert [id(p) for p in model.parameters()] == ids and model["tied"].weight is model["q"].weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    where = model["q"].weight.data_ptr()
    pack_([model["q"].weight, model["k"].weight])
    assert model["q"].weight.data_ptr() == where, "what is packed stays where it is"
    pack_([])
    whole = torch.randn(6, 4)
    assert adjacent([whole[:2], whole[2:5], whole[5:]]) and adjacent([whole[1:3]])
    for parts in (
        [whole[2:], whole[:2]],
        [whole[:2], whole[3:]],
        [whole[:, :2], whole[:, 2:]],
        [whole[:2], whole[2:].half()],
        [whole[:0]],
    ):
        assert not adjacent(parts)


def test_a_second_backward_names_the_group_and_the_remedies() -> None:
    x, weights = torch.randn(3, 4), [torch.randn(2, 4, requires_grad=True) for _ in range(2)]

    def parts() -> tuple[torch.Tensor, ...]:
        return packed_linear(x, weights).split(2, -1)

    first, second = parts()
    first.sum().backward()
    with pytest.raises(KernelError, match=r"qkv.*retain_graph=True to the first"):
        second.sum().backward()
    first, second = parts()
    first.sum().backward(retain_graph=True)
    second.sum().backward()
