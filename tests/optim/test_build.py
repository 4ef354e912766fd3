"""Optimizers by name from a configuration, in DeepSpeed's dialect and with torch's names."""

import pytest
import torch

from hf_zero.config import OptimizerConfig
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.optim import CPUAdagrad, CPUAdam, CPULion, Lion, build_optimizer


def build(kind, **params):
    return build_optimizer(OptimizerConfig(kind, params), [torch.nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adagrad", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
def test_torch_classes_by_name_in_any_case(name):
    for spelled in (name, name.lower(), name.upper()):
        assert type(build(spelled, lr=0.5)) is getattr(torch.optim, name)


@pytest.mark.parametrize("kind", ["Adam", "FusedAdam"])
def test_adam_means_adamw_unless_told_otherwise(kind):
    assert type(build(kind)) is torch.optim.AdamW
    assert type(build(kind, adam_w_mode=True)) is torch.optim.AdamW
    assert type(build(kind, adam_w_mode=False)) is torch.optim.Adam
    assert type(build(kind, adamw_mode=False)) is torch.optim.Adam
    assert type(build("AdamW", adam_w_mode=False)) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        ("Adam", {}, 0.0),
        ("AdamW", {}, 0.0),
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0),
        ("AdamW", {"weight_decay": 0.3}, 0.3),
        ("NAdam", {}, 0),
    ],
)
def test_weight_decay_defaults_are_those_of_the_dialect(kind, params, decay):
    assert build(kind, **params).param_groups[0]["weight_decay"] == decay


def test_parameters_arrive():
    group = build(
        "AdamW",
        lr=2e-5,
        betas=[0.8, 0.9],
        eps=1e-6,
        weight_decay=0.1,
        bias_correction=True,
        amsgrad=True,
        set_grad_none=True,
    ).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"], group["amsgrad"]) == (
        2e-5,
        (0.8, 0.9),
        1e-6,
        0.1,
        True,
    )
    assert build("SGD", momentum=0.9, nesterov=True, fused=False).param_groups[0]["fused"] is False


def test_lion_and_its_aliases():
    for kind in ("Lion", "FusedLion"):
        optimizer = build(kind)
        assert type(optimizer) is Lion and optimizer.param_groups[0]["lr"] == 1e-3
    assert build("lion", lr=0.2, betas=[0.5, 0.6]).param_groups[0]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("CPUAdam", CPUAdam),
        ("CPULion", CPULion),
        ("CPUAdagrad", CPUAdagrad),
        ("DeepSpeedCPUAdam", CPUAdam),
    ],
)
def test_names_of_the_host_optimizers(kind, cls):
    assert type(build(kind)) is cls


def test_host_adam_decays_apart_unless_told_otherwise_and_keeps_moments_as_told():
    assert build("DeepSpeedCPUAdam").param_groups[0]["decoupled_weight_decay"] is True
    assert build("CPUAdam", adam_w_mode=False).param_groups[0]["decoupled_weight_decay"] is False
    assert build("CPUAdam", adamw_mode=False).param_groups[0]["decoupled_weight_decay"] is False
    assert build("CPUAdam", fp32_optimizer_states=False).param_groups[0]["moments"] == "bf16"
    assert build("CPULion", moments="int8").param_groups[0]["moments"] == "int8"
    assert build("DeepSpeedCPULion").param_groups[0]["lr"] == 1e-3
    with pytest.raises(ConfigError, match="moments of CPUAdam is 8; write a word such as fp32"):
        build("CPUAdam", moments=8)
    with pytest.raises(
        NotBuiltError, match="fp32_optimizer_states: false is not built for CPUAdagrad"
    ):
        build("CPUAdagrad", fp32_optimizer_states=False)


def test_groups_keep_what_they_set():
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": w} for w in (0.0, 0.2)
    ]
    optimizer = build_optimizer(OptimizerConfig("AdamW", {"weight_decay": 0.1, "lr": 0.3}), groups)
    assert [(g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [
        (0.0, 0.3),
        (0.2, 0.3),
    ]


@pytest.mark.parametrize(
    ("kind", "close"),
    [("AdmaW", "AdamW"), ("FusedAdm", "FusedAdam"), ("SGDD", "SGD"), ("lions", "Lion")],
)
def test_unknown_type_is_answered_with_the_nearest(kind, close):
    with pytest.raises(
        ConfigError, match=rf"unknown optimizer type '{kind}'; did you mean '{close}'"
    ):
        build(kind)


def test_unknown_type_that_resembles_nothing():
    with pytest.raises(
        ConfigError, match="unknown optimizer type 'zzz'; known here: ASGD, Adadelta"
    ):
        build("zzz")


@pytest.mark.parametrize("kind", ["MuonAdamW", "LBFGS", "SparseAdam", "muadam"])
def test_known_but_not_built(kind):
    with pytest.raises(NotBuiltError, match=rf"(?i)optimizer type '{kind}' is not built"):
        build(kind)


@pytest.mark.parametrize(
    ("kind", "params", "error", "message"),
    [
        (
            "AdamW",
            {"learning_rate": 1},
            ConfigError,
            r"unknown optimizer.params key 'learning_rate' for AdamW",
        ),
        (
            "AdamW",
            {"weight_decy": 1},
            ConfigError,
            r"'weight_decy' for AdamW; did you mean 'weight_decay'\?",
        ),
        ("SGD", {"adam_w_mode": True}, ConfigError, r"'adam_w_mode' for SGD"),
        ("AdamW", {"max_grad_norm": 1.0}, ConfigError, r"max_grad_norm .*write gradient_clipping"),
        ("AdamW", {"lr": "auto"}, ConfigError, r'optimizer.params.lr of AdamW is "auto"'),
        (
            "AdamW",
            {"lr": "1e-5"},
            ConfigError,
            r"params.lr of AdamW is '1e-5'; write a number \(YAML",
        ),
        ("AdamW", {"lr": True}, ConfigError, r"lr of AdamW is True; write a number"),
        ("AdamW", {"amsgrad": 1}, ConfigError, r"amsgrad of AdamW is 1; write true or false"),
        (
            "AdamW",
            {"adam_w_mode": "yes"},
            ConfigError,
            r"adam_w_mode of AdamW is 'yes'; write true or false",
        ),
        ("AdamW", {"foreach": 3}, ConfigError, r"foreach of AdamW is 3; write true, false or null"),
        (
            "AdamW",
            {"betas": [0.9]},
            ConfigError,
            r"betas of AdamW is \[0.9\]; write a list of 2 numbers",
        ),
        ("AdamW", {"betas": 0.9}, ConfigError, r"betas of AdamW is 0.9; write a list"),
        (
            "AdamW",
            {"lr": -1.0},
            ConfigError,
            r"optimizer 'AdamW' with \{'lr': -1.0\}: Invalid learning rate",
        ),
        ("AdamW", {"fused": True, "foreach": True}, ConfigError, r"cannot be `True` together"),
        (
            "AdamW",
            {"fp32_optimizer_states": False},
            NotBuiltError,
            r"fp32_optimizer_states: false is not built",
        ),
    ],
)
def test_bad_parameters_are_named(kind, params, error, message):
    with pytest.raises(error, match=message):
        build(kind, **params)
