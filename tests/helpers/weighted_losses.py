"""A model and a loss with weights of its own, which the optimizer holds outside the model, and the
same training in plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

import hf_zero

ROWS, STEPS, SCALE = 12, 3, 256.0
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


def train(
    engine: Any, loss: Loss, rank: int, ranks: int, steps: range = range(STEPS)
) -> list[float]:
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
