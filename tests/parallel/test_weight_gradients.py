"""Gradients of column-wise weights, computed beside the sum of their input's gradient: the same
bits as without, and between its launch and its wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.shared_inputs import SharedInputs
from hf_zero.parallel.tensor.weight_gradients import WeightGradients
from hf_zero.zero.layout import wrap
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import MODELS, TensorJob, llama, train_tensor_parallel
from tests.helpers.training import Plan, Trace, plain_sgd


def _as_it_is(model: nn.Module) -> None:
    """A model is trained as it is."""


def _linear_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [each for each in model.named_modules() if isinstance(each[1], nn.Linear)]


def _partly_frozen(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(False)
        layer.mlp.up_proj.weight.requires_grad_(False)


def _reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


BLOCKS = {"activation_checkpointing": {"blocks": True}}
SMALL = {"stage3_module_granularity_threshold": 0, "stage3_param_persistence_threshold": 0}
APART = "each linear layer is a unit, stage"
BF16, ADDED = Plan(steps=2, precision="bf16"), Plan(steps=2, accumulation=2, clip=0.5)
# model, stage, what is done to the model, keys, plan
WAYS: dict[str, tuple[str, int, Callable[[Any], None], dict[str, Any], Plan]] = {
    "stage 0": ("gpt2", 0, _as_it_is, {}, ADDED),
    "stage 1": ("t5", 1, _as_it_is, {}, ADDED),
    "stage 2": ("bert", 2, _as_it_is, {}, ADDED),
    "stage 3": ("llama-mqa", 3, _as_it_is, {}, ADDED),
    "bf16": ("qwen3", 3, _as_it_is, {}, BF16),
    "recomputed": ("llama", 3, _as_it_is, BLOCKS, ADDED),
    "recomputed, encoder and decoder": ("t5", 2, _as_it_is, BLOCKS, ADDED),
    "recomputed by reentrant checkpoints": ("llama", 3, _reentrant, {}, ADDED),
    "weights that are frozen": ("llama", 3, _partly_frozen, {}, ADDED),
    f"{APART} 2": ("llama", 2, _as_it_is, {"zero_optimization": {"stage": 2, **SMALL}}, ADDED),
    f"{APART} 3": ("llama", 3, _as_it_is, {"zero_optimization": {"stage": 3, **SMALL}}, ADDED),
    "each block is a unit": (
        "llama",
        3,
        _as_it_is,
        {"zero_optimization": {"stage": 3, **SMALL}},
        ADDED,
    ),
}
FEWER = {"stage 0": 1, "weights that are frozen": 2}  # weights that read one input and train


@contextmanager
def _one_after_the_other() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedInputs, "_beside", lambda *_: None)
        yield


def _trained(way: str) -> Trace:
    name, stage, prepare, keys, plan = WAYS[way]
    return train_tensor_parallel(TensorJob(name, plain_sgd), plan, 2, stage, prepare, **keys)


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_those_of_one_after_the_other(way, monkeypatch):
    computed = []
    plain = WeightGradients.compute

    def compute(self, x):
        found = plain(self, x)
        computed.append(sum(each is not None for each in found))
        return found

    monkeypatch.setattr(WeightGradients, "compute", compute)
    if way.startswith(APART):
        monkeypatch.setattr(wrap, "find_blocks", _linear_units)
    with _one_after_the_other():
        wanted = _trained(way)
    assert not computed
    found = _trained(way)
    assert max(computed) == (1 if way.startswith(APART) else FEWER.get(way, 3))
    assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
    for mine, theirs in zip((found.weights, *found.grads), (wanted.weights, *wanted.grads)):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def _on_ranks(run: Callable[[Any], Any], make: Callable[[], nn.Module] = llama) -> list[Any]:
    model = seeded(make)
    copies = [copy.deepcopy(model) for _ in range(2)]
    return run_ranks(2, lambda rank: run(hf_zero.tensor_parallel(copies[rank], 2)))


def _loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(**MODELS["llama"].batch(0, 0, 0)).loss
    return loss


def test_weights_are_between_the_launch_of_a_sum_and_its_wait(monkeypatch):
    order: dict[int, list[str]] = {}
    launch, compute = TensorAxis.launch_sum, WeightGradients.compute

    def launched(self, x, name):
        seen = order.setdefault(self.rank, [])
        seen.append(f"launch {name}")
        total, under_way = launch(self, x, name)
        wait = under_way.wait
        monkeypatch.setattr(under_way, "wait", lambda: (seen.append("wait"), wait()))
        return total, under_way

    def computed(self, x):
        found = compute(self, x)
        seen = order[get_parallel().along("tensor").rank]
        seen.append(f"{sum(each is not None for each in found)} weights")
        return found

    monkeypatch.setattr(TensorAxis, "launch_sum", launched)
    monkeypatch.setattr(WeightGradients, "compute", computed)

    def run(model):
        loss = _loss(model)
        seen = order[get_parallel().along("tensor").rank]
        seen.clear()
        loss.backward()
        return list(seen)

    wanted = ["launch lm_head", "1 weights", "wait"]
    for number in (1, 0):
        for part, weights in (("mlp", "2 weights"), ("self_attn", "3 weights")):
            wanted += [f"launch model.layers.{number}.{part}", weights, "wait"]
    assert _on_ranks(run) == [wanted, wanted]


def test_gradients_that_are_asked_for_in_part():
    """Gradients of one weight or of one activation alone, twice of one graph, and under
    autocast.
    """

    def run(model):
        layer, kept = model.model.layers[1], list[torch.Tensor]()
        layer.input_layernorm.register_forward_hook(lambda *given: kept.append(given[1][0]))
        weights = [layer.self_attn.k_proj.weight, layer.mlp.gate_proj.weight]
        loss = _loss(model)
        found = [*torch.autograd.grad(loss, weights[0], retain_graph=True)]
        found += torch.autograd.grad(loss, kept[0], retain_graph=True)
        for _ in range(2):
            loss.backward(retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model)
        loss.backward()
        return [*found, *(each.grad for each in model.parameters())]

    with _one_after_the_other():
        wanted = _on_ranks(run)
    for mine, theirs in zip(_on_ranks(run), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_layers_that_compute_otherwise_keep_their_backward():
    """A subclass with a forward of its own, an input that is no plain memory, and weights that a
    model does not use in this forward.
    """

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def made():
        model: Any = llama()
        for layer in model.model.layers:
            layer.self_attn.k_proj.__class__ = Doubled
            layer.mlp.register_forward_pre_hook(
                lambda _, given: (given[0].transpose(0, 1).contiguous().transpose(0, 1),)
            )
        gate = model.model.layers[0].mlp.gate_proj
        gate.register_forward_hook(lambda *given: given[2].detach())
        return model

    def run(model):
        _loss(model).backward()
        return [each.grad for each in model.parameters()]

    with _one_after_the_other():
        wanted = _on_ranks(run, made)
    for mine, theirs in zip(_on_ranks(run, made), wanted, strict=True):
        assert sum(each is None for each in theirs) == 1
        for a, b in zip(mine, theirs, strict=True):
            assert a is b is None or torch.equal(a, b)
