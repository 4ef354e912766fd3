"""Parameters that a module wants beside each other: one matrix product over them at every stage,
and nothing else changes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_zero.ops.packed_linear import adjacent, packed_linear
from tests.helpers import oracle
from tests.helpers.engines import (
    STAGES,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import HIDDEN, Stack, seeded
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Driver, Job, Plan, adamw

NAMES = ("first", "second", "third")


class Branches(nn.Module):
    """Three layers of one input with a bias each, as BERT's q, k and v; ``packed`` computes them
    in one product.
    """

    def __init__(self, packed: bool, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.first, self.second, self.third = (
            nn.Linear(HIDDEN, 16),
            nn.Linear(HIDDEN, 8),
            nn.Linear(HIDDEN, 16),
        )
        self.back = nn.Linear(40, HIDDEN)
        self.packed, self.found = packed, []
        self.second.requires_grad_(not frozen)
        if packed:
            self._hf_zero_packed = tuple(
                tuple(f"{name}.{kind}" for name in NAMES) for kind in ("weight", "bias")
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [getattr(self, name) for name in NAMES]
        if self.packed:
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
            self.found.append(adjacent(weights) and adjacent(biases))
            parts = packed_linear(self.norm(x), weights, biases)
        else:
            parts = [F.linear(self.norm(x), layer.weight, layer.bias) for layer in layers]
        return x + self.back(torch.tanh(torch.cat(parts, dim=-1)))


class Packed(Job):
    def __init__(self, packed: bool, frozen: bool = False) -> None:
        self.packed, self.frozen = packed, frozen
        self.built: list[nn.Module] = []

    def build(self) -> nn.Module:
        def make() -> nn.Module:
            model = Stack(depth=2)
            model.blocks = nn.ModuleList(Branches(self.packed, self.frozen) for _ in range(2))
            return model

        self.built.append(seeded(make))
        return self.built[-1]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return squared(net, at, net.dtype)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_equals_the_oracle_and_packs_are_adjacent(stage):
    plan, job = Plan(ranks=2, steps=3, accumulation=2), Packed(True)
    oracle.compare(
        train_on_threads(job, plan, engine_opener(stage)), oracle.run(Packed(False), plan)
    )
    found = [each for model in job.built for block in model.blocks for each in block.found]
    assert found and all(found)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_one_parts_them_and_the_run_is_right(stage):
    plan, job = Plan(ranks=2, steps=2), Packed(True, frozen=True)
    oracle.compare(
        train_on_threads(job, plan, engine_opener(stage)),
        oracle.run(Packed(False, frozen=True), plan),
    )
    assert not any(each for model in job.built for block in model.blocks for each in block.found)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_checkpoints_are_the_same_with_and_without(tmp_path, packed, stage):
    """Saved by one, loaded by the other: the weights, and the step that follows with the
    optimizer's state.
    """

    def step(engine, number, rank):
        engine.backward(squared(engine, At(number, 0, rank)))
        engine.step()

    def save(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        step(engine, 0, rank)
        engine.save_checkpoint(str(tmp_path))
        step(engine, 1, rank)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    def load(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        engine.load_checkpoint(str(tmp_path))
        step(engine, 1, rank)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want = on_ranks(2, save, build=Packed(packed).build)[0]
    got = on_ranks(2, load, build=Packed(not packed).build)[0]
    assert want.keys() == got.keys()
    for name in want:
        assert torch.allclose(got[name], want[name], rtol=1e-5, atol=1e-6), name
