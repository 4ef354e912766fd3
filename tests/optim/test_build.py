"""Optimizers by name from a configuration, in DeepSpeed's dialect and with torch's names."""

import torch

from hf_zero.config import OptimizerConfig
from hf_zero.optim import CPUAdagrad, CPUAdam, CPULion, Lion, build_optimizer


def build(kind, **params):
    return build_optimizer(OptimizerConfig(kind, params), [torch.nn.Parameter(torch.zeros(3))])


TORCHS = [
    "Adadelta",
    "Adagrad",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
TORCHS += ["Rprop", "SGD"]
HOST = {"CPUAdam": CPUAdam, "CPULion": CPULion, "CPUAdagrad": CPUAdagrad}


def test_classes_by_name_in_any_case():
    for name in TORCHS:
        for spelled in (name, name.lower(), name.upper()):
            assert type(build(spelled, lr=0.5)) is getattr(torch.optim, name)
    for name, cls in {**HOST, "DeepSpeedCPUAdam": CPUAdam}.items():
        assert type(build(name)) is cls
    for kind in ("Lion", "FusedLion"):
        optimizer = build(kind)
        assert type(optimizer) is Lion and optimizer.param_groups[0]["lr"] == 1e-3
    assert build("lion", lr=0.2, betas=[0.5, 0.6]).param_groups[0]["betas"] == (0.5, 0.6)


def test_adam_means_adamw_unless_told_otherwise():
    for kind in ("Adam", "FusedAdam"):
        assert type(build(kind)) is type(build(kind, adam_w_mode=True)) is torch.optim.AdamW
        assert type(build(kind, adam_w_mode=False)) is torch.optim.Adam
        assert type(build(kind, adamw_mode=False)) is torch.optim.Adam
    assert type(build("AdamW", adam_w_mode=False)) is torch.optim.AdamW
    for told, decoupled in (({}, True), ({"adam_w_mode": False}, False)):
        group = build("CPUAdam", **told).param_groups[0]
        assert group["decoupled_weight_decay"] is decoupled
    assert build("CPUAdam", adamw_mode=False).param_groups[0]["decoupled_weight_decay"] is False


DECAYS = [
    ("Adam", {}, 0.0),
    ("AdamW", {}, 0.0),
    ("AdamW", {"torch_adam": True}, 0.01),
    ("Adam", {"torch_adam": True}, 0.01),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0),
    ("AdamW", {"weight_decay": 0.3}, 0.3),
    ("NAdam", {}, 0),
]


def test_parameters_arrive_with_the_defaults_of_the_dialect():
    for kind, params, decay in DECAYS:
        assert build(kind, **params).param_groups[0]["weight_decay"] == decay, (kind, params)
    given = {"lr": 2e-5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}
    group = build("AdamW", bias_correction=True, set_grad_none=True, **given).param_groups[0]
    assert {name: group[name] for name in given} == {**given, "betas": (0.8, 0.9)}
    assert build("SGD", momentum=0.9, nesterov=True, fused=False).param_groups[0]["fused"] is False
    assert build("CPUAdam", fp32_optimizer_states=False).param_groups[0]["moments"] == "bf16"
    assert build("CPULion", moments="int8").param_groups[0]["moments"] == "int8"
    assert build("DeepSpeedCPULion").param_groups[0]["lr"] == 1e-3
