"""Derivation of the whole parameters that see parts of activations, against the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor import cuts_of
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.causal_zoo import batch_of, by_model_type, tiny
from tests.helpers.cells import in_one_item
from tests.helpers.models import seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.tensor_parallel import boxes_of, llama, put_together
from tests.parallel.test_tensor_layers import loss_and_gradients

# A mechanism each: an activation with parameters, sums of modules and stacked gates that a plan
# does not call so, latent attention, an index beside it, sinks, convolutions.
SOON = {"apertus", "inkling_text", "deepseek_v32", "qwen3_next", "doge"}
REFUSED = {
    "doge": "DogeForCausalLM runs whole, and cut by its tensor-parallel plan it does not",
    "lfm2": "are one parameter, which the tensor-parallel plan leaves whole there",
    "lfm3": "are one parameter, which the tensor-parallel plan leaves whole there",
}


def _compare(model, batch, **plan):
    """Loss and gradients of ``model`` cut among two ranks, against those of the whole."""
    copies = [copy.deepcopy(model) for _ in range(2)]

    def share(rank):
        cut = hf_zero.tensor_parallel(copies[rank], 2, **plan)
        loss, gradients = loss_and_gradients(cut, batch)
        named = dict(cut.named_parameters())
        partial = {name for name in gradients if sharding_of(named[name]).partial}
        return loss, gradients, boxes_of(cut), partial

    parts = run_ranks(2, share, timeout=240)
    loss, gradients = loss_and_gradients(model, batch)
    assert parts[1][0] == pytest.approx(loss, rel=1e-4)
    assert set(parts[0][1]) == set(gradients)
    sums = [
        {
            name: sum(part[1][name] for part in parts) if name in partial else gradient
            for name, gradient in found.items()
        }
        for _, found, _, partial in parts
    ]
    got = put_together(sums, [part[2] for part in parts], exact=False)
    compare_tensors("gradient", got, gradients, tolerance=2e-3, floor=1e-5)


pytest_generate_tests = by_model_type(SOON, with_plan=True)


def test_every_model_type_that_has_a_plan(model_type):
    if model_type not in REFUSED:
        _compare(tiny(model_type), batch_of())
        return
    with pytest.raises(RankFailed, match=REFUSED[model_type]) as raised:
        _compare(tiny(model_type), batch_of())
    assert isinstance(raised.value.__cause__, ConfigError)


class _Between(nn.Module):
    """An activation with a weight, between layers that are cut; ``whole`` weighs what comes in."""

    def __init__(self, inner, whole=False):
        super().__init__()
        self.inner, self.whole = inner, whole
        self.weight = nn.Parameter(torch.full((), 0.7))

    def forward(self, x):
        if self.whole:
            return self.inner(self.weight * x)  # type: ignore[no-any-return]
        return self.weight * self.inner(x)  # type: ignore[no-any-return]


class _Gated(nn.Module):
    """A layer that is cut, times something of its input, which is whole."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * x.mean(-1, keepdim=True)  # type: ignore[no-any-return]


class _Twice(nn.Module):
    """A layer that is cut, and one that reads its elements."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.then = inner, nn.Linear(1, 2)

    def forward(self, x):
        return self.then(self.inner(x).unsqueeze(-1)).sum(-1)  # type: ignore[no-any-return]


class _ReadsNumbers(_Between):
    def forward(self, x):
        return super().forward(x) if x.detach().numpy().any() else x


def _changed(name, made):
    """A Llama with ``made`` around one layer of each MLP."""
    model: Any = seeded(llama)
    for layer in model.model.layers:
        setattr(layer.mlp, name, made(getattr(layer.mlp, name)))
    return model


@in_one_item((("act_fn", None, False), ("up_proj", "inner", False), ("up_proj", "inner", True)))
def test_parameters_that_no_plan_names(case):
    name, inner, whole = case
    place = f"model.layers.*.mlp.{name}"
    plan = {place: None, f"{place}.{inner}": "colwise"} if inner else None
    model = _changed(name, lambda inner: _Between(inner, whole))
    cut = copy.deepcopy(model)
    if plan is None:
        marks = {each for each, sharding in cuts_of(cut, 2).items() if sharding.partial}
        assert marks == {layer.mlp.act_fn.weight for layer in cut.model.layers}
    _compare(model, batch_of(), plan=plan)


MISPLACED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "mixed": (
        lambda: _changed("up_proj", _Gated),
        {"mlp.up_proj": None, "mlp.up_proj.inner": "colwise"},
        "in one place and with whole ones in another",
    ),
    "parts twice": (
        lambda: _changed("up_proj", _Twice),
        {"mlp.up_proj": None, "mlp.up_proj.inner": "colwise", "mlp.up_proj.then": "colwise"},
        "takes whole inputs by its style",
    ),
    "nothing cut": (
        lambda: seeded(llama),
        {"mlp": "all_reduce", **dict.fromkeys(("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"))},
        "all that it is given is whole",
    ),
    "does not run": (lambda: seeded(llama), {"mlp.down_proj": None}, "runs whole, and cut"),
    "cannot be run": (lambda: _changed("act_fn", _ReadsNumbers), {}, "mlp.act_fn.weight is whole"),
}


@in_one_item(MISPLACED)
def test_what_cannot_be_placed(case):
    make, plan, words = MISPLACED[case]
    models = [make() for _ in range(2)]
    plan = {f"model.layers.*.{name}": style for name, style in plan.items()}
    with pytest.raises(RankFailed, match=words) as raised:
        run_ranks(2, lambda rank: hf_zero.tensor_parallel(models[rank], 2, plan=plan))
    assert isinstance(raised.value.__cause__, ConfigError)
    assert not any(sharding_of(each).axes for each in models[0].parameters())


def test_what_the_plan_says_where_nothing_runs():
    model = _changed("act_fn", _ReadsNumbers)
    plan = {"model.layers.*.mlp.act_fn.weight": "replicated_with_grad_allreduce"}
    _compare(model, batch_of(), plan=plan)
