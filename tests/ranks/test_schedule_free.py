"""Optimizers with weights for training and others for evaluation, between which their own ``train``
and ``eval`` switch, as those of schedule-free learning (arXiv 2405.15682) do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import UnsupportedOptimizerError
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks

ROWS = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1))


class ScheduleFree(torch.optim.Optimizer):
    """SGD that steps at an interpolation of its iterates and of their average."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "trains": False})

    @torch.no_grad()
    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] is not trains:
                group["trains"] = trains
                weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "iterate" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["iterate"], weight)

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["trains"], "not in its training mode"
            group["steps"] += 1
            share, beta, lr = 1 / group["steps"], group["beta"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    iterate = self.state[parameter].setdefault("iterate", parameter.clone())
                    parameter.lerp_(iterate, share)
                    parameter.add_(parameter.grad, alpha=lr * (beta * (1 - share) - 1))
                    iterate.sub_(parameter.grad, alpha=lr)


def build() -> torch.nn.Module:
    return seeded(
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    )


def evaluated(
    model: Any, optimizer: Any, update: Any, rank: int = 0, ranks: int = 1
) -> list[float]:
    """Return the losses of evaluations in the middle and at the end."""
    losses = []
    for number, rows in enumerate(ROWS):
        optimizer.train()
        update(model(rows.chunk(ranks)[rank]).square().mean())
        if number in (2, 4):
            optimizer.eval()
            with torch.no_grad():
                losses.append(float(model(ROWS[0]).square().mean()))
    return losses


def plainly() -> list[float]:
    model = build()
    optimizer = ScheduleFree(model.parameters())

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return evaluated(model, optimizer, update)


def config(stage: int, **more: Any) -> dict[str, Any]:
    whole = {"stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "elementwise_optimizers": ["ScheduleFree"],
        "zero_optimization": {"stage": stage, **whole},
        **more,
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluations_are_those_of_plain_torch(stage: int) -> None:
    def over(rank: int) -> list[float]:
        model = build()
        engine, optimizer, *_ = hf_zero.initialize(
            model=model, optimizer=ScheduleFree(model.parameters()), config=config(stage)
        )

        def update(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        losses = evaluated(engine, optimizer, update, rank, 2)
        engine.destroy()
        return losses

    for losses in run_ranks(2, over):
        assert losses == pytest.approx(plainly(), rel=1e-5)


PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 1000}}
HOST = {"device": "cpu"}
REFUSED = [
    (1, {}),
    (2, {}),
    (3, PERSISTENT),
    (0, {"bf16": {"enabled": True}}),
    (3, {"zero": {"offload_optimizer": HOST}}),
    (3, {"zero": {"offload_param": HOST}}),
]


@pytest.mark.parametrize("stage, keys", REFUSED)
def test_where_modules_read_other_memory_it_is_refused(stage: int, keys: dict[str, Any]) -> None:
    def over(rank: int) -> None:
        model = build()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(UnsupportedOptimizerError, match="ScheduleFree"):
            hf_zero.initialize(
                model=model,
                optimizer=ScheduleFree(model.parameters()),
                config=config(stage, **dict(keys)),
            )
        assert all(map(torch.equal, model.parameters(), before))

    run_ranks(2, over)
