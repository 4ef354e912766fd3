"""Models whose blocks lie in containers of any kind, defined in any order and used in any other,
train as in plain PyTorch: random programs.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.cells import runs_long
from tests.helpers.engines import config_of, start
from tests.helpers.ranks import run_ranks

WIDTH, ROWS, STEPS = 8, 4, 3


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.two(torch.tanh(self.one(rows)))


def leaf(draw: random.Random) -> nn.Module:
    return draw.choice([lambda: nn.Linear(WIDTH, WIDTH), Pair, lambda: nn.LayerNorm(WIDTH)])()


def container(draw: random.Random, depth: int) -> nn.Module:
    """Return a container, whose items are blocks or containers."""
    count = draw.randint(1, 3)
    items = [
        container(draw, depth - 1) if depth and draw.random() < 0.5 else leaf(draw)
        for _ in range(count)
    ]
    if count > 1 and draw.random() < 0.2:
        items[-1] = items[0]  # shared
    kind = draw.choice(["list", "dict", "sequential"])
    if kind == "list":
        return nn.ModuleList(items)
    if kind == "dict":
        return nn.ModuleDict({f"b{at}": item for at, item in enumerate(items)})
    if all(type(item).forward is not nn.Module.forward for item in items):
        return nn.Sequential(*items)
    return nn.ModuleList(items)


class Model(nn.Module):
    """Parts that are defined in one drawn order and used in another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        parts: dict[str, nn.Module] = {"embedding": nn.Embedding(16, WIDTH)}
        parts["head"] = nn.Linear(WIDTH, 16)
        names = [f"layers{at}" for at in range(draw.randint(1, 3))]
        parts |= {name: container(draw, 2) for name in names}
        for name in draw.sample(sorted(parts), len(parts)):
            self.add_module(name, parts[name])
        self.order = draw.sample(names, len(names))
        self.reverses = {name: draw.random() < 0.5 for name in names}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(tokens)
        for name in self.order:
            rows = self.over(self.get_submodule(name), rows, self.reverses[name])
        return nn.functional.cross_entropy(self.head(rows), tokens)

    def over(self, part: nn.Module, rows: torch.Tensor, backwards: bool) -> torch.Tensor:
        if type(part).forward is not nn.Module.forward:
            return rows + 0.3 * part(rows)
        items = list(part.values() if isinstance(part, nn.ModuleDict) else part)
        for item in reversed(items) if backwards else items:
            rows = self.over(item, rows, backwards)
        return rows


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 16, (ROWS,), generator=generator)


def plainly(model: nn.Module) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for rank in range(2):
            (model(tokens(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(rank: int, models: list[nn.Module], stage: int) -> dict[str, torch.Tensor]:
    model = models[rank]
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_module_granularity_threshold": 0,
    }
    engine = start(
        model, torch.optim.SGD(model.parameters(), 0.1), config_of(stage, zero_optimization=zero)
    )
    for step in range(STEPS):
        engine.backward(engine(tokens(step, rank)))
        engine.step()
    weights: dict[str, torch.Tensor] = engine.state_dict()
    engine.destroy()
    return weights


def test_as_in_plain_pytorch(pytestconfig: pytest.Config) -> None:
    failed: list[Any] = []
    for seed in range(400 if runs_long(pytestconfig) else 12):
        stages = (0, 1, 2, 3) if runs_long(pytestconfig) else (seed % 4,)
        model = Model(seed)
        want = plainly(model)
        for stage in stages:
            models = [copy.deepcopy(model) for _ in range(2)]
            try:
                for got in run_ranks(2, trained, models, stage):
                    for name, value in want.items():
                        distance = float((got[name] - value).norm() / value.norm().clamp(min=1))
                        assert distance < 1e-5, f"{name} is off by {distance:.1e}"
            except AssertionError as error:
                failed.append(f"seed {seed}, stage {stage}, {model}: {str(error)[-600:]}")
    assert not failed, "\n\n".join(failed)
