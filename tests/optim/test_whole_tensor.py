"""LAMB and LARS in one process against their formulas, written down tensor by tensor."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.optim import LARS, Lamb
from hf_zero.optim.elementwise import check

SHAPES = ((4, 3), (5,), (), (7, 2, 2))


def parameters() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    made[1].data.zero_()  # whose norm is 0 in the first step
    return made


def ratio(weight: float, update: float, low: float, high: float) -> float:
    return min(max(weight / update, low), high) if weight and update else 1.0


def lamb(
    w: torch.Tensor, g: torch.Tensor, kept: dict[str, torch.Tensor], t: int, of: dict[str, Any]
) -> float:
    """One step of DeepSpeed's LAMB; the trust ratio."""
    beta1, beta2 = of["betas"]
    m = kept["m"] = beta1 * kept.get("m", torch.zeros_like(w)) + (1 - beta1) * g
    v = kept["v"] = beta2 * kept.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
    below = (v + of["eps"]).sqrt() if of["eps_inside_sqrt"] else v.sqrt() + of["eps"]
    u = m / below + of["weight_decay"] * w
    r = ratio(float(w.norm()), float(u.norm()), of["min_coeff"], of["max_coeff"])
    c = math.sqrt(1 - beta2**t) / (1 - beta1**t) if of["bias_correction"] else 1.0
    w -= of["lr"] * c * r * u
    return r


def lars(
    w: torch.Tensor, g: torch.Tensor, kept: dict[str, torch.Tensor], t: int, of: dict[str, Any]
) -> None:
    decay = of["weight_decay"]
    r = 1.0
    if w.dim() > 1 and float(w.norm()) and float(g.norm()):
        below = float(g.norm()) + decay * float(w.norm()) + of["eps"]
        r = of["trust_coefficient"] * float(w.norm()) / below
    step = of["lr"] * r * (g + decay * w)
    b = kept["b"] = of["momentum"] * kept.get("b", torch.zeros_like(w)) + step
    w -= step + of["momentum"] * b if of["nesterov"] else b


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_coeff": 0.3, "weight_decay": 0.1, "betas": (0.8, 0.99)},
        {"bias_correction": False, "eps_inside_sqrt": True, "eps": 1e-3},
    ],
)
def test_lamb_is_its_formula(settings):
    mine = parameters()
    want, kept = [p.detach().clone() for p in mine], [{} for _ in mine]
    optimizer = Lamb(mine, lr=0.02, **settings)
    assert optimizer.get_lamb_coeffs() == []
    for step in range(1, 6):
        ratios = []
        for p, w, state in zip(mine, want, kept):
            p.grad = torch.randn_like(p)
            ratios.append(lamb(w, p.grad, state, step, optimizer.param_groups[0]))
        optimizer.step()
        assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-12)
    assert len(set(ratios)) > 1 or settings.get("max_coeff") == 0.3
    for p, w in zip(mine, want):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1, "momentum": 0.5}, {"nesterov": True, "trust_coefficient": 0.1}],
)
def test_lars_is_its_formula(settings):
    mine = parameters()
    want, kept = [p.detach().clone() for p in mine], [{} for _ in mine]
    optimizer = LARS(mine, lr=0.5, **settings)
    for step in range(1, 6):
        for p, w, state in zip(mine, want, kept):
            p.grad = torch.randn_like(p)
            lars(w, p.grad, state, step, optimizer.param_groups[0])
        optimizer.step()
    for p, w in zip(mine, want):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Lamb, LARS])
def test_parameters_without_a_gradient_stay_and_count_by_themselves(kind):
    mine = parameters()
    optimizer = kind(mine)
    for step in range(3):
        for place, p in enumerate(mine):
            p.grad = None if place == 2 and step != 1 else torch.ones_like(p)
        before = mine[2].detach().clone()
        optimizer.step()
        assert torch.equal(mine[2].detach(), before) == (step != 1)
    assert [int(optimizer.state[p]["step"]) for p in mine] == [3, 3, 1, 3]


@pytest.mark.parametrize("kind", [Lamb, LARS])
def test_a_copy_goes_on_alike(kind):
    mine = parameters()
    optimizer = kind(mine)
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        for p in each.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        assert each.step(lambda: 3.0) == 3.0
    for p, q in zip(mine, other.param_groups[0]["params"]):
        assert p is not q and torch.equal(p, q)


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (Lamb, {"lr": -1.0}, "Lamb: lr is -1.0"),
        (Lamb, {"betas": (0.9, 1.0)}, "Lamb: betas is .* give two numbers in"),
        (Lamb, {"eps": -1.0}, "Lamb: eps is -1.0"),
        (Lamb, {"max_coeff": 0.1, "min_coeff": 0.2}, "min_coeff is 0.2 and max_coeff 0.1"),
        (LARS, {"lr": -1.0}, "LARS: lr is -1.0"),
        (LARS, {"momentum": 1.0}, "LARS: momentum is 1.0"),
        (LARS, {"trust_coefficient": 0.0}, "LARS: .*trust_coefficient 0.0"),
    ],
)
def test_settings_out_of_range(kind, settings, match):
    with pytest.raises(ConfigError, match=match):
        kind(parameters(), **settings)


@pytest.mark.parametrize("kind", [Lamb, LARS])
def test_sparse_gradients_are_refused(kind):
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedOptimizerError, match=r"shape \(4, 2\) is sparse"):
        kind(table.parameters()).step()


class OwnStep(Lamb):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_of_ones_own_is_refused_on_shards():
    check(Lamb(parameters()))
    with pytest.raises(UnsupportedOptimizerError, match="optimizer OwnStep cannot run"):
        check(OwnStep(parameters()))
