"""Updates against torch.optim's own single-tensor loops, over several steps, to a few units in
the last place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.ops import adagrad, adam, lion, sgd
from hf_zero.optim import Lion

NUMEL = 3001
STEPS = 5
ULPS = 16  # of the largest of what is added up


def trajectory(make: Any, gradients: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    param = torch.nn.Parameter(start)
    optimizer = make([param])
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(NUMEL, generator=generator) for _ in range(STEPS)]


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool(((ours - theirs).abs() <= ULPS * 2.0**-24 * theirs.abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5)])
def test_adam(
    isa: str, decoupled: bool, amsgrad: bool, maximize: bool, betas: tuple[float, float]
) -> None:
    common: dict[str, Any] = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1, "maximize": maximize}
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs, state = trajectory(
        lambda p: cls(p, betas=betas, amsgrad=amsgrad, foreach=False, fused=False, **common),
        gradients(),
    )
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    mean = torch.zeros(NUMEL)
    square = torch.zeros(NUMEL)
    largest = torch.zeros(NUMEL) if amsgrad else None
    for step, gradient in enumerate(gradients(), 1):
        settings = {
            **common,
            "step": step,
            "beta1": betas[0],
            "beta2": betas[1],
            "decoupled": decoupled,
        }
        adam(master, gradient, mean, square, max_exp_avg_sq=largest, **settings)
    assert close(master, theirs)
    assert close(mean, state["exp_avg"])
    assert close(square, state["exp_avg_sq"])


def test_lion(isa: str) -> None:
    theirs, state = trajectory(
        lambda p: Lion(p, lr=1e-2, weight_decay=0.1, foreach=False), gradients()
    )
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    mean = torch.zeros(NUMEL)
    for gradient in gradients():
        lion(master, gradient, mean, lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1)
    assert close(master, theirs) and close(mean, state["exp_avg"])


def test_adagrad(isa: str) -> None:
    common = {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10}
    theirs, state = trajectory(
        lambda p: torch.optim.Adagrad(p, foreach=False, fused=False, **common), gradients()
    )
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(NUMEL)
    for step, gradient in enumerate(gradients(), 1):
        adagrad(master, gradient, total, step=step, **common)
    assert close(master, theirs) and close(total, state["sum"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(isa: str, nesterov: bool) -> None:
    common: dict[str, Any] = {
        "lr": 1e-2,
        "momentum": 0.9,
        "nesterov": nesterov,
        "dampening": 0.0 if nesterov else 0.2,
        "weight_decay": 0.1,
    }
    theirs, state = trajectory(
        lambda p: torch.optim.SGD(p, foreach=False, fused=False, **common), gradients()
    )
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    buffer = torch.zeros(NUMEL)
    for step, gradient in enumerate(gradients()):
        sgd(master, gradient, buffer, first_step=step == 0, **common)
    assert close(master, theirs) and close(buffer, state["momentum_buffer"])
