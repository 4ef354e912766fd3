"""Adafactor, Muon, LAMB and LARS in one process: against transformers' and torch's updates, and
their formulas written down tensor by tensor; what they refuse.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers

from hf_zero.config import OptimizerConfig
from hf_zero.config.feature_rows import loaded
from hf_zero.config.optimizers import OPTIMIZERS
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.optim import LARS, Adafactor, Lamb, Muon, build_optimizer
from hf_zero.optim.adoption import adopt, give_back
from hf_zero.optim.elementwise import check
from hf_zero.optim.muon import hidden_matrices, muon_groups
from tests.helpers.cells import in_one_item
from tests.helpers.optimizers import WHOLE

SHAPES = ((4, 3), (5,), (), (7, 2, 2))


def parameters():
    made = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    made[1].data.zero_()  # whose norm is 0 in the first step
    return made


def ratio(weight, update, low, high):
    return min(max(weight / update, low), high) if weight and update else 1.0


def lamb(w, g, kept, t, of):
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


def lars(w, g, kept, t, of):
    decay = of["weight_decay"]
    r = 1.0
    if w.dim() > 1 and float(w.norm()) and float(g.norm()):
        below = float(g.norm()) + decay * float(w.norm()) + of["eps"]
        r = of["trust_coefficient"] * float(w.norm()) / below
    step = of["lr"] * r * (g + decay * w)
    b = kept["b"] = of["momentum"] * kept.get("b", torch.zeros_like(w)) + step
    w -= step + of["momentum"] * b if of["nesterov"] else b


LAMBS = [
    {},
    {"max_coeff": 0.3, "weight_decay": 0.1, "betas": (0.8, 0.99)},
    {"bias_correction": False, "eps_inside_sqrt": True, "eps": 1e-3},
]
LARSES = [{}, {"weight_decay": 0.1, "momentum": 0.5}, {"nesterov": True, "trust_coefficient": 0.1}]


@in_one_item([(Lamb, 0.02, lamb, each) for each in LAMBS] + [(LARS, 0.5, lars, e) for e in LARSES])
def test_it_is_its_formula(case):
    kind, lr, formula, settings = case
    mine = parameters()
    want, kept = [p.detach().clone() for p in mine], [{} for _ in mine]
    optimizer = kind(mine, lr=lr, **settings)
    assert kind is LARS or optimizer.get_lamb_coeffs() == []
    for step in range(1, 6):
        ratios = []
        for p, w, state in zip(mine, want, kept):
            p.grad = torch.randn_like(p)
            ratios.append(formula(w, p.grad, state, step, optimizer.param_groups[0]))
        optimizer.step()
        if kind is Lamb:
            assert optimizer.get_lamb_coeffs() == pytest.approx(ratios, rel=1e-12)
            assert len(set(ratios)) > 1 or settings.get("max_coeff") == 0.3
    for p, w in zip(mine, want):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


def test_each_class_has_a_row_of_the_tests_on_ranks():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    rows = {type(row.ours(model)) for row in WHOLE.values()}
    named = {loaded(row.cls) for row in OPTIMIZERS if row.update == "rounds" and row.names}
    assert named <= rows, f"add rows to WHOLE in tests/helpers/optimizers.py: {named - rows}"


@in_one_item([Lamb, LARS])
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
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        for p in each.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        assert each.step(lambda: 3.0) == 3.0
    for p, q in zip(mine, other.param_groups[0]["params"]):
        assert p is not q and torch.equal(p, q), "a copy goes on alike"
    own = type("OwnStep", (kind,), {"step": lambda self, closure=None: None})
    with pytest.raises(UnsupportedOptimizerError, match="optimizer OwnStep cannot run"):
        check(own(parameters()))


@in_one_item([(Adafactor, transformers.Adafactor), (torch.optim.Adafactor,) * 2])
def test_tensors_without_elements_beside_others(classes):
    cls, theirs = classes
    shapes = ((0, 4), (4, 0), (2, 0, 3), (0,), (4, 3))
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    want = torch.nn.Parameter(mine[-1].detach().clone())
    optimizers = cls(mine), theirs([want])
    adopt(optimizers[0])
    for _ in range(2):
        for p in (*mine, want):
            p.grad = torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(mine[-1], want, rtol=1e-6, atol=1e-7)
    assert [tuple(p.shape) for p in mine] == list(shapes)


@in_one_item([{}, {"nesterov": False}, {"ns_steps": 3, "lr": 0.1}])
def test_it_is_torchs_update_and_adamws(settings):
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (3, 9), (5,), (2, 3, 2))]
    want = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    ours = Muon([{"params": mine[:2]}, {"params": mine[2:], "use_muon": False}], **settings)
    lr = settings.get("lr", 1e-3)
    theirs = torch.optim.Muon(want[:2], **settings)
    rest = torch.optim.AdamW(want[2:], lr=lr, weight_decay=0.1)
    for _ in range(5):
        for p, w in zip(mine, want):
            p.grad = torch.randn_like(p)
            w.grad = p.grad.clone()
        for optimizer in (ours, theirs, rest):
            optimizer.step()
    for p, w in zip(mine, want):
        torch.testing.assert_close(p, w, rtol=1e-6, atol=1e-7)
    assert sorted(ours.state[mine[0]]) == ["momentum_buffer", "step"]
    assert sorted(ours.state[mine[3]]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_vector_goes_to_adamw_and_a_group_stays_of_its_kind():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([weight])
    with pytest.raises(ConfigError, match=r"parameter 0 of group 1 has shape \(3,\).*use_muon"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) has no exp_avg, exp_avg_sq.*use_muon"):
        optimizer.step()


def test_settings_of_a_group_of_muon_are_checked():
    optimizer = Muon([torch.nn.Parameter(torch.ones(2, 2))])
    for wrong in ({"lr": -1.0}, {"adjust_lr_fn": "none"}, {"betas": (0.9, 1.0)}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"{name} is"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3))], **wrong})
    assert len(optimizer.param_groups) == 1


def test_groups_of_muon_from_named_parameters_and_a_lone_tensor():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False))
    plain = muon_groups(model.parameters(), model)
    assert [(group["use_muon"], len(group["params"])) for group in plain] == [(True, 2), (False, 1)]
    named = muon_groups(model.named_parameters(), model)
    assert [[p for _, p in group["params"]] for group in named] == [g["params"] for g in plain]
    optimizer = Muon(named)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    (lone,) = muon_groups([{"params": model[1].weight}], model)
    assert lone["use_muon"] and lone["params"] == [model[1].weight]


def test_muon_by_a_configuration():
    """Hidden matrices are neither embeddings nor the head; groups are parted."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16)
    model = transformers.BertForMaskedLM(config)
    hidden = hidden_matrices(model)
    others = {n for n, p in model.named_parameters() if not any(p is each for each in hidden)}
    matrices = {name for name in others if model.get_parameter(name).ndim > 1}
    kinds = ("word", "position", "token_type")
    assert matrices == {f"bert.embeddings.{kind}_embeddings.weight" for kind in kinds}
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 0.7}]
    params = {"lr": 0.5, "muon_lr": 0.1, "adam_lr": 0.2, "momentum": 0.8}
    made = build_optimizer(OptimizerConfig(type="muon", params=params), groups, model)
    keys = ("use_muon", "lr", "weight_decay")
    told = [(*(g[key] for key in keys), len(g["params"])) for g in made.param_groups]
    assert told == [
        (True, 0.1, 0.3, len(hidden)),
        (False, 0.2, 0.3, len(matrices)),
        (False, 0.7, 0.1, len(rest)),
    ]


ADAFACTOR_SHAPES = ((4, 3), (5,), (), (3, 2, 4), (1, 6))
SETTINGS: list[dict[str, Any]] = [
    {},
    {"warmup_init": True, "clip_threshold": 0.3},
    {"beta1": 0.9, "weight_decay": 0.1},
    {"lr": 0.03, "relative_step": False, "scale_parameter": False},
    {"lr": 0.03, "relative_step": False, "eps": (1e-3, 0.5), "decay_rate": -0.5},
]


def of_several_shapes():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ADAFACTOR_SHAPES]


def stepped_alike(ours, mine, theirs, want, first=0):
    for step in range(first, first + 5):
        torch.manual_seed(step)
        for p, w in zip(mine, want):
            p.grad = torch.randn_like(p) * (0.0 if step == 2 and p.ndim == 2 else 1.0)
            w.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for p, w in zip(mine, want):
            torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-6)


@in_one_item(SETTINGS)
def test_it_is_transformers_update(settings):
    mine, want = of_several_shapes(), of_several_shapes()
    ours = Adafactor(mine, **settings)
    stepped_alike(ours, mine, transformers.Adafactor(want, **settings), want)
    names = {"step"} | ({"exp_avg"} if "beta1" in settings else set())
    factors = {"exp_avg_sq_row": (3, 2), "exp_avg_sq_col": (3, 4)}
    assert set(ours.state[mine[3]]) == names | {*factors}
    assert {name: tuple(ours.state[mine[3]][name].shape) for name in factors} == factors
    params = {"lr": 0.1, "relative_step": False, "beta1": None, "eps": [0.1, 0.2]}
    group = build_optimizer(OptimizerConfig("adafactor", params), mine).param_groups[0]
    assert (group["lr"], group["eps"]) == (0.1, (0.1, 0.2))
    mine, want = of_several_shapes(), of_several_shapes()
    for each in (mine, want):  # several dtypes, and a state dict
        each[0].data, each[3].data = each[0].data.double(), each[3].data.double()
    ours, theirs = Adafactor(mine, **settings), transformers.Adafactor(want, **settings)
    stepped_alike(ours, mine, theirs, want)
    fresh, saved = Adafactor(mine, **settings), copy.deepcopy(ours.state_dict())
    for entries in saved["state"].values():  # as of release 0.2
        entries["factors"] = {name: entries.pop(name) for name in {*entries} - names}
    fresh.load_state_dict(saved)
    stepped_alike(fresh, mine, theirs, want, 5)


ADOPTED = [
    (transformers.Adafactor, SETTINGS[0]),
    (transformers.Adafactor, SETTINGS[2]),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adafactor, {"lr": 0.5, "weight_decay": 0.1, "d": 1.5, "maximize": True}),
    (torch.optim.Adafactor, {"eps": (1e-2, 0.3), "beta2_decay": -0.5}),
]


@in_one_item(ADOPTED)
def test_an_object_of_another_library_goes_on_as_it_was(case):
    """Also with the state of steps before."""
    kind, settings = case
    mine, want = of_several_shapes(), of_several_shapes()
    ours, theirs = kind(mine, **settings), kind(want, **settings)
    stepped_alike(ours, mine, theirs, want)
    if "lr" in settings:
        torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0)
    adopt(ours)
    assert isinstance(ours, kind) and type(ours) is not kind
    stepped_alike(ours, mine, theirs, want, 5)
    assert {"row_var", "exp_avg_sq_row", "variance", "exp_avg_sq"} & {*ours.state[mine[0]]}
    give_back(ours)
    assert type(ours) is kind
