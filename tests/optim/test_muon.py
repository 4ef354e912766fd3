"""Muon in one process: torch.optim's update, its groups, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_zero.config import OptimizerConfig
from hf_zero.errors import ConfigError
from hf_zero.optim import Muon, build_optimizer
from hf_zero.optim.muon import hidden_matrices


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, {"ns_steps": 3, "lr": 0.1}])
def test_it_is_torchs_update_and_adamws(settings):
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (3, 9), (5,), (2, 3, 2))]
    want = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    ours = Muon([{"params": mine[:2]}, {"params": mine[2:], "use_muon": False}], **settings)
    lr = settings.get("lr", 1e-3)
    theirs = [
        torch.optim.Muon(want[:2], **settings),
        torch.optim.AdamW(want[2:], lr=lr, weight_decay=0.1),
    ]
    for _ in range(5):
        for p, w in zip(mine, want):
            p.grad = torch.randn_like(p)
            w.grad = p.grad.clone()
        for optimizer in (ours, *theirs):
            optimizer.step()
    for p, w in zip(mine, want):
        torch.testing.assert_close(p, w, rtol=1e-6, atol=1e-7)
    assert sorted(ours.state[mine[0]]) == ["momentum_buffer", "step"]
    assert sorted(ours.state[mine[3]]) == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"weight_decay": -1.0}, "weight_decay -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\)"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn is 'none'"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"ns_coefficients": (1.0,)}, "ns_coefficients"),
    ],
)
def test_what_is_out_of_range_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], **settings)


def test_a_vector_goes_to_adamw():
    optimizer = Muon([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ConfigError, match=r"parameter 0 of group 1 has shape \(3,\).*use_muon"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


def test_a_group_stays_of_its_kind():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([weight])
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) has no exp_avg, exp_avg_sq.*use_muon"):
        optimizer.step()


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return transformers.BertForMaskedLM(config)


def test_hidden_matrices_are_neither_embeddings_nor_the_head():
    model = bert()
    hidden = hidden_matrices(model)
    found = {name for name, p in model.named_parameters() if any(p is each for each in hidden)}
    layer = "bert.encoder.layer.0."
    parts = ("query", "key", "value")
    assert found == {
        *(f"{layer}attention.self.{part}.weight" for part in parts),
        f"{layer}attention.output.dense.weight",
        f"{layer}intermediate.dense.weight",
        f"{layer}output.dense.weight",
        "cls.predictions.transform.dense.weight",
    }


def test_groups_of_the_configuration_are_parted():
    model = bert()
    model.cls.predictions.transform.dense.weight.use_muon = False
    params = {"lr": 0.5, "muon_lr": 0.1, "adam_lr": 0.2, "momentum": 0.8}
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.7},
    ]
    made = build_optimizer(OptimizerConfig(type="muon", params=params), groups, model)
    assert isinstance(made, Muon)
    names, parted = ("use_muon", "lr", "weight_decay"), made.param_groups
    told = [(*(group[name] for name in names), len(group["params"])) for group in parted]
    assert told == [
        (True, 0.1, 0.3, 6),
        (False, 0.2, 0.3, len(decayed) - 6),
        (False, 0.7, 0.1, len(groups[1]["params"])),
    ]


def test_keys_of_the_configuration():
    weight: Any = torch.nn.Parameter(torch.ones(2, 2))
    weight.use_muon = True
    params: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}
    made = build_optimizer(OptimizerConfig(type="Muon", params=params), [weight])
    assert made.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    for method in ("gram", "standard"):
        made = build_optimizer(OptimizerConfig(type="Muon", params={"ns_method": method}), [weight])
        assert made.param_groups[0]["ns_steps"] == 5
    for wrong in ("svd", 3):
        with pytest.raises(ConfigError, match="ns_method"):
            build_optimizer(OptimizerConfig(type="Muon", params={"ns_method": wrong}), [weight])
    for key, value in (("use_muon", False), ("adjust_lr_fn", True), ("nesterov", "yes")):
        with pytest.raises(ConfigError, match=key):
            build_optimizer(OptimizerConfig(type="Muon", params={key: value}), [weight])


def test_without_a_model_parameters_are_tagged():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    section = OptimizerConfig(type="Muon", params={})
    with pytest.raises(ConfigError, match="no attribute use_muon"):
        build_optimizer(section, [weight])
    weight.use_muon = True  # type: ignore[attr-defined]
    assert build_optimizer(section, [weight]).param_groups[0]["use_muon"]
