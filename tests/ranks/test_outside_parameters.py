"""Parameters of the optimizer outside the model, such as the weights of a loss, against the same
lines in plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import hf_zero
from hf_zero.errors import CheckpointError, PartitionError
from hf_zero.zero.layout.parameter import name_of, owner_of
from tests.helpers.ranks import run_ranks

ROWS, STEPS, SCALE = 12, 3, 256.0
ON_CPU = {"device": "cpu"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Loss(nn.Module):
    """A loss with weights; ``scale`` is read before the model runs, ``idle`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, net: Callable[[torch.Tensor], torch.Tensor], x: Any, y: Any) -> torch.Tensor:
        factor = self.scale.exp()
        logits = self.head(net(x.to(self.head.weight.dtype))) * factor
        return nn.functional.cross_entropy(logits.float(), y)


def built() -> tuple[nn.Module, Loss]:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), Loss()


def optimizer_of(model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
    first, *others = loss.parameters()
    groups = [{"params": [*model.parameters(), first]}, {"params": others, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-6)


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def weights_of(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.detach().float().clone() for module in modules for p in module.parameters()]


def plainly(
    precision: str = "fp32", accumulation: int = 1, clip: float = 0.0, steps: int = STEPS
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the norms and the weights of plain PyTorch over the global batch; in 16 bits of the
    same mixed precision, with fp32 master weights.
    """
    model, loss = built()
    optimizer, norms, dtype = optimizer_of(model, loss), [], DTYPES[precision]
    scale = SCALE if precision == "fp16" else 1.0
    for step in range(steps):
        for micro in range(accumulation):
            cast = [{n: p.to(dtype) for n, p in each.named_parameters()} for each in (model, loss)]

            def net(x: torch.Tensor) -> Any:
                return functional_call(model, cast[0], x)  # noqa: B023

            value = functional_call(loss, cast[1], (net, *batch(step, micro)))
            (value * scale / accumulation).backward()
        trained = [p for p in (*model.parameters(), *loss.parameters()) if p.grad is not None]
        for parameter in trained:
            parameter.grad /= scale
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights_of(model, loss)


def config_of(
    stage: int,
    ranks: int,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = 0.0,
    **zero: Any,
) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": ROWS // ranks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["loss_scale"] = SCALE
    return config


def own_rows(rank: int, ranks: int, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    return (tensor.split(ROWS // ranks)[rank] for tensor in tensors)


def train(engine: Any, loss: Loss, rank: int, ranks: int, steps: range = range(STEPS)) -> list[float]:
    norms = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(loss(engine, *own_rows(rank, ranks, *batch(step, micro))))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def masters_of(*modules: nn.Module) -> list[torch.Tensor]:
    parameters = [p for module in modules for p in module.parameters()]
    return [hf_zero.safe_get_full_fp32_param(p).clone() for p in parameters]


def pairs(ranks: int) -> list[tuple[nn.Module, Loss]]:
    """A model and a loss for each rank; the loss of rank 0 alone has the values that count."""
    model, loss = built()
    losses = [copy.deepcopy(loss) for _ in range(ranks)]
    for other in losses[1:]:
        with torch.no_grad():
            other.head.weight.add_(1.0)
            other.scale.fill_(7.0)
    return [(copy.deepcopy(model), each) for each in losses]


def distance(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    got_all, want_all = (torch.cat([w.flatten() for w in weights]) for weights in (got, want))
    return float((got_all - want_all).norm() / want_all.norm())


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "accumulated": {"accumulation": 2, "clip": 0.1},
    "offloaded": {"accumulation": 2, "clip": 0.1, "offload_optimizer": ON_CPU},
    "updated in the backward": {"update_in_backward": True},
    "bf16": {"precision": "bf16", "accumulation": 2, "clip": 0.1},
    "bf16, offloaded": {"precision": "bf16", "clip": 0.1, "offload_optimizer": ON_CPU},
    "fp16": {"precision": "fp16", "accumulation": 2, "clip": 0.1},
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_plain_pytorch(stage: int, ranks: int) -> None:
    for number, (name, setting) in enumerate(SETTINGS.items()):
        if ranks == 3 and (number + stage) % 2:
            continue
        modules = pairs(ranks)

        def run(rank: int) -> tuple[list[float], list[torch.Tensor]]:
            model, loss = modules[rank]  # noqa: B023
            engine = hf_zero.initialize(
                model=model,
                optimizer=optimizer_of(model, loss),
                config=config_of(stage, ranks, **setting),  # noqa: B023
            )[0]
            norms = train(engine, loss, rank, ranks)
            got = masters_of(model, loss)
            assert list(engine.state_dict()) == list(model.state_dict())
            assert len(dict(engine.consolidated())) == 4
            engine.destroy(gather=True)
            assert {type(p) for p in loss.parameters()} == {nn.Parameter}
            return norms, got

        plan = {key: setting[key] for key in ("precision", "accumulation", "clip") if key in setting}
        norms, want = plainly(**{**plan, "precision": "fp32"})
        for got_norms, got in run_ranks(ranks, run):
            if plan.get("precision", "fp32") == "fp32":
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)
                torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0, msg=name)
            else:
                allowed = 1.2 * distance(plainly(**plan)[1], want)
                assert distance(got, want) <= allowed, (name, distance(got, want), allowed)
