"""What optimizers, schedules and their sections refuse, by the name of what is wrong: one table of
calls, errors and words that each error says.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import OptimizerConfig, SchedulerConfig, ZeroConfig
from hf_zero.errors import ConfigError, NotBuiltError, UnsupportedOptimizerError
from hf_zero.optim import (
    CPUSGD,
    LARS,
    Adafactor,
    AdamW8bit,
    CPUAdagrad,
    CPUAdam,
    CPULion,
    Lamb,
    Lion,
    Muon,
    OneBitAdam,
    WarmupLR,
    ZeroOneAdam,
    build_optimizer,
    build_scheduler,
)
from hf_zero.optim.moment_formats import refuse_on_device
from hf_zero.optim.muon import muon_groups
from hf_zero.optim.one_bit import one_bit_of
from tests.helpers.cells import in_one_item

Row = tuple[Callable[[], object], type[Exception], str]


def matrix(**more: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2, **more))


def build(kind: str, params: dict[str, Any] | None = None, tagged: bool = True) -> Any:
    weight = matrix()
    if tagged:
        weight.use_muon = True  # type: ignore[attr-defined]
    return build_optimizer(OptimizerConfig(kind, params or {}), [weight])


def schedule(kind: str, params: dict[str, Any] | None = None) -> Any:
    optimizer = torch.optim.AdamW([{"params": [matrix()], "lr": 0.5}])
    return build_scheduler(SchedulerConfig(kind, params or {}), optimizer)


NAMES: list[tuple[str, type[Exception], str]] = [
    ("AdmaW", ConfigError, "'AdmaW'; did you mean 'AdamW'"),
    ("zzz", ConfigError, "'zzz'; known here: ASGD, Adadelta"),
    *((name, NotBuiltError, rf"(?i)'{name}'") for name in ("MuonAdamW", "LBFGS", "SparseAdam")),
]
PARAMETERS: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"learning_rate": 1}, "'learning_rate' for AdamW"),
    ("AdamW", {"weight_decy": 1}, r"'weight_decy' for AdamW; did you mean 'weight_decay'"),
    ("AdamW", {"max_grad_norm": 1.0}, "max_grad_norm .*gradient_clipping"),
    ("AdamW", {"lr": "auto"}, 'lr of AdamW is "auto"'),
    ("AdamW", {"lr": "1e-5"}, "lr of AdamW is '1e-5'; write a number"),
    ("AdamW", {"adam_w_mode": "yes"}, "adam_w_mode of AdamW is 'yes'"),
    ("AdamW", {"lr": -1.0}, r"'AdamW' with \{'lr': -1.0\}"),
    ("AdamW", {"fused": True, "foreach": True}, "cannot be `True` together"),
    ("CPUAdam", {"moments": 8}, "moments of CPUAdam is 8"),
    ("Muon", {"ns_method": "svd"}, "ns_method"),
    ("Muon", {"use_muon": False}, "use_muon"),
    ("Muon", {"adjust_lr_fn": True}, "adjust_lr_fn"),
    ("Adafactor", {"beta1": "0.9"}, "beta1"),
    ("Adafactor", {"betas": [0.9, 0.99]}, "betas"),
]
NOT_NARROW = {"fp32_optimizer_states": False}
BUILT: list[Row] = [
    *((lambda name=name: build(name), error, said) for name, error, said in NAMES),
    *((lambda row=row: build(*row[:2]), ConfigError, row[2]) for row in PARAMETERS),
    (lambda: build("AdamW", NOT_NARROW), NotBuiltError, "fp32_optimizer_states: false"),
    (lambda: build("CPUAdagrad", NOT_NARROW), NotBuiltError, "built for CPUAdagrad"),
    (lambda: build("Muon", tagged=False), ConfigError, "no attribute use_muon"),
    (
        lambda: build_optimizer(OptimizerConfig("AdamW", {}), []),
        ConfigError,
        "empty parameter list. Pass parameters that it trains",
    ),
    (
        lambda: build_optimizer(OptimizerConfig("AdamW", {}), ["an empty parameter list"]),
        ConfigError,
        "Correct optimizer.params",
    ),
]

OF_SCHEDULES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("WarmupDecay", {}, ConfigError, "'WarmupDecay'; did you mean .*'WarmupDecayLR'"),
    ("lambdalr", {}, NotBuiltError, "'LambdaLR'.*pass lr_scheduler="),
    ("OneCycleLR", {"max_lr": 0.1}, ConfigError, r"OneCycleLR with \{'max_lr': 0.1\}"),
    ("WarmupLR", {"warmup_steps": 3}, ConfigError, "'warmup_steps' .*'warmup_num_steps'"),
    ("WarmupLR", {"warmup_max_lr": "auto"}, ConfigError, 'warmup_max_lr of WarmupLR is "auto"'),
    ("WarmupDecayLR", {}, ConfigError, "WarmupDecayLR needs total_num_steps"),
    ("OneCycle", {"cycle_min_lr": 0.1}, ConfigError, "OneCycle needs cycle_max_lr"),
    ("WarmupLR", {"warmup_type": "linaer"}, ConfigError, "'linaer'; did you mean 'linear'"),
    ("WarmupLR", {"warmup_num_steps": -1}, ConfigError, "warmup_num_steps of WarmupLR is -1"),
    ("WarmupLR", {"warmup_max_lr": "1e-5"}, ConfigError, "warmup_max_lr of WarmupLR is '1e-5'"),
    ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, ConfigError, r"warmup_min_lr .*\[0.1, 0.2\]"),
    ("WarmupLR", {"last_batch_iteration": "9"}, ConfigError, "last_batch_iteration .* is '9'"),
    *(
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, key: -1},
            ConfigError,
            f"{key} .*-1",
        )
        for key in ("decay_step_size", "decay_lr_rate")
    ),
    ("LRRangeTest", {"lr_range_test_step_rate": None}, ConfigError, "step_rate .* is None"),
]
SCHEDULES: list[Row] = [
    *((lambda row=row: schedule(*row[:2]), row[2], row[3]) for row in OF_SCHEDULES),
    (lambda: WarmupLR(3), ConfigError, "WarmupLR needs a torch.optim.Optimizer, not a int"),
    (
        lambda: WarmupLR(Adafactor([matrix()])),
        ConfigError,
        r"and Adafactor makes .*\(lr is None\); give it lr",
    ),
    (lambda: WarmupLR(Lion([matrix()])).step("9"), ConfigError, "last_batch_iteration .*'9'"),
    (
        lambda: WarmupLR(Lion([matrix()])).load_state_dict({"last_epoch": 3}),
        ConfigError,
        "a state dict with last_epoch has no last_batch_iteration",
    ),
]

WITH_BETAS = (CPUAdam, CPULion, AdamW8bit, Lion, Lamb, Muon)
CHECKED = (*WITH_BETAS, CPUAdagrad, CPUSGD, LARS, functools.partial(Adafactor, relative_step=False))

SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    (CPUAdam, {"lr": -1.0}, "CPUAdam: lr is -1.0"),
    (CPUAdam, {"eps": float("nan")}, "CPUAdam: eps is nan"),
    (CPUAdam, {"moments": "fp8"}, "CPUAdam: moments is 'fp8'"),
    (CPULion, {"betas": (-0.1, 0.9)}, r"CPULion: betas is \(-0.1, 0.9\); give two numbers"),
    (CPUAdagrad, {"lr_decay": "0.1"}, "CPUAdagrad: lr_decay is '0.1'; give a number"),
    (CPUSGD, {"dampening": None}, "CPUSGD: dampening is None"),
    *((kind, {"lr": "0.1"}, "lr is '0.1'; give a number") for kind in CHECKED),
    *((kind, {"lr": torch.ones(2)}, "lr is tensor.*give a number") for kind in CHECKED),
    *(
        (kind, {"weight_decay": float("nan"), "lr": 0.1}, "weight_decay is nan; give a number")
        for kind in CHECKED
    ),
    *((kind, {"betas": 0.9}, "betas is 0.9; give two numbers") for kind in WITH_BETAS),
    *((kind, {"betas": (0.9,)}, r"betas is \(0.9,\); give two numbers") for kind in WITH_BETAS),
    (AdamW8bit, {"min_8bit_size": "4096"}, "min_8bit_size is '4096'.*write 4096 or more"),
    (AdamW8bit, {"optim_bits": 4}, "AdamW8bit: optim_bits is 4; write 8, or 32"),
    (AdamW8bit, {"min_8bit_size": 1000}, "min_8bit_size is 1000.*write 4096 or more"),
    (AdamW8bit, {"lr": -1.0}, "AdamW8bit: lr is -1.0"),
    (CPUSGD, {"nesterov": True}, "CPUSGD: nesterov needs momentum"),
    (Lion, {"lr": -1.0}, "Lion: lr is -1.0"),
    (Lion, {"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
    (Lion, {"weight_decay": -0.1}, "weight_decay is -0.1"),
    (Lamb, {"lr": -1.0}, "Lamb: lr is -1.0"),
    (Lamb, {"betas": (0.9, 1.0)}, "Lamb: betas is"),
    (Lamb, {"eps": -1.0}, "Lamb: eps is -1.0"),
    (Lamb, {"max_coeff": 0.1, "min_coeff": 0.2}, "min_coeff is 0.2 and max_coeff 0.1"),
    (LARS, {"lr": -1.0}, "LARS: lr is -1.0"),
    (LARS, {"momentum": 1.0}, "LARS: momentum is 1.0"),
    (LARS, {"trust_coefficient": 0.0}, "LARS: trust_coefficient is 0.0"),
    (Muon, {"weight_decay": -1.0}, "weight_decay is -1.0"),
    (Muon, {"momentum": 1.0}, "momentum is 1.0"),
    (Muon, {"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
    (Muon, {"adjust_lr_fn": "none"}, "adjust_lr_fn is 'none'"),
    (Muon, {"ns_steps": 100}, "ns_steps is 100"),
    (Muon, {"ns_steps": 5.5}, "ns_steps is 5.5; give an integer below 100"),
    (Muon, {"eps": -1.0}, "eps is -1.0"),
    (Muon, {"adam_eps": -1.0}, "adam_eps is -1.0"),
    (Muon, {"ns_coefficients": (1.0,)}, "ns_coefficients"),
    (Adafactor, {"lr": 0.1}, "lr is 0.1 and relative_step is true"),
    (Adafactor, {"relative_step": False}, "lr is None"),
    (Adafactor, {"lr": 0.1, "relative_step": False, "warmup_init": True}, "warmup_init is True"),
    (Adafactor, {"clip_threshold": 0.0}, "clip_threshold is 0.0; give a number above 0"),
    (Adafactor, {"decay_rate": 0.8}, "decay_rate is 0.8"),
    (Adafactor, {"weight_decay": -1.0}, "weight_decay is -1.0"),
    (Adafactor, {"beta1": 1.0}, "beta1 is 1.0"),
    (Adafactor, {"eps": 1e-8}, "eps is 1e-08; give two numbers of at least 0"),
    (OneBitAdam, {"betas": 0.9}, "needs a first one in"),
    (ZeroOneAdam, {"var_freeze_step": 2.5}, "var_freeze_step is 2.5"),
    (ZeroOneAdam, {"var_update_scaler": True}, "var_update_scaler is True"),
    (OneBitAdam, {"betas": (0.0, 0.9)}, "needs a first one in"),
]


def stepped(cls: Any, **kind: Any) -> None:
    parameter = matrix(**kind)
    parameter.grad = torch.ones_like(parameter)
    cls([parameter]).step()


WIDE, META = {"dtype": torch.float64}, {"device": "meta"}
PLACED = r": a parameter of shape \(2, 2\) is on meta.*offload_optimizer"
TAKEN: list[Row] = [
    *(
        (
            lambda cls=cls: stepped(cls, **META),
            UnsupportedOptimizerError,
            cls.__name__ + PLACED,
        )
        for cls in (CPUAdam, CPULion, CPUAdagrad, CPUSGD)
    ),
    (lambda: stepped(CPUAdam, **WIDE), UnsupportedOptimizerError, "is torch.float64"),
    (
        lambda: refuse_on_device(CPULion([matrix()]), torch.device("cuda", 1), "root"),
        UnsupportedOptimizerError,
        "CPULion updates state in host memory, and that of 'root' .*'cuda' .*offload_optimizer",
    ),
]


def decayed(cls: Any) -> None:
    """CPUAdagrad takes sparse gradients, unless weights decay."""
    weight = matrix()
    weight.grad = torch.ones(2, 2).to_sparse()
    cls([weight], weight_decay=0.1).step()


SPARSE: list[Row] = [
    (lambda cls=cls: decayed(cls), UnsupportedOptimizerError, r"shape \(2, 2\) is sparse")
    for cls in (CPUAdam, CPUAdagrad, Lion, Lamb, LARS)
]


def config(stage: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> ZeroConfig:
    return ZeroConfig.from_dict({"zero_optimization": {"stage": stage, **(zero or {})}, **more})


ONE = {"bits": 1, "freeze_step": 5}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
OF_SECTIONS: list[tuple[ZeroConfig, str]] = [
    (config(3), "OneBitAdam in 1 bit does not go with zero_optimization.stage: 3"),
    (config(compressed_communication={"bits": 4}), "one of the two; remove the key"),
    (config(zero={"zero_quantized_gradients": True}), "travel twice; remove the key"),
    (config(zero=OFFLOADED), "offload_optimizer: the update"),
    (config(zero={"update_in_backward": True}), "update_in_backward: momenta are exchanged"),
    (config(replicate_size=2), "replicate_size: messages go over one axis"),
    (config(data_types={"grad_accum_dtype": "bf16"}), "grad_accum_dtype: bf16: the grad"),
]
GROUPS = [{"params": [matrix()]}, {"params": [matrix()], "betas": (0.5, 0.9)}]
AdamW = torch.optim.AdamW
OF_OPTIMIZERS: list[tuple[dict[str, Any], Callable[[], Any], str]] = [
    (ONE, lambda: AdamW([matrix()], amsgrad=True), "amsgrad: a group sets it"),
    (ONE, lambda: AdamW([matrix()], maximize=True), "maximize: a group sets it"),
    (ONE, lambda: AdamW(copy.deepcopy(GROUPS)), "betas: groups differ"),
    (ONE, lambda: AdamW([matrix()], betas=(0.0, 0.9)), r"give a first one in \(0, 1\)"),
    (ONE, lambda: torch.optim.Adam([matrix()], weight_decay=0.1), "weight_decay of Adam"),
    (ONE, lambda: torch.optim.SGD([matrix()], lr=0.1), "the optimizer is SGD"),
    ({"bits": 1}, lambda: AdamW([matrix()]), r"without compressed_communication\.freeze_step"),
    ({"freeze_step": 4}, lambda: OneBitAdam([matrix()]), "in the parameters of OneBitAdam"),
    ({"freeze_step": 4}, lambda: AdamW([matrix()]), "write bits: 1, or remove it"),
    ({"freeze_step": 4, "bits": 4}, lambda: AdamW([matrix()]), "is for bits: 1 with Adam"),
]
IN_ONE_BIT: list[Row] = [
    *(
        (lambda of=of: one_bit_of(of, OneBitAdam([matrix()], freeze_step=3)), ConfigError, said)
        for of, said in OF_SECTIONS
    ),
    *(
        (
            lambda of=of, make=make: one_bit_of(config(compressed_communication=of), make()),
            ConfigError,
            said,
        )
        for of, make, said in OF_OPTIMIZERS
    ),
]
OUTSIDE: list[Row] = [
    *((lambda row=row: row[0]([matrix()], **row[1]), ConfigError, row[2]) for row in SETTINGS),
    (lambda: OneBitAdam([matrix()], lr=-1.0), ValueError, "Invalid learning rate"),
    *(
        (lambda given=given: muon_groups(given, nn.Linear(2, 2)), ConfigError, f"Muon: {said}")
        for given, said in (
            (matrix(), r"params is Parameter[\s\S]* without parameters; pass"),
            (None, "params is None, without parameters"),
            ([{"lr": 0.1}], r"params is \[{'lr': 0.1}\], without parameters"),
            (["weight"], "a parameter is a str; pass model.parameters"),
            ([[matrix()]], "a parameter is a list"),
        )
    ),
]


@in_one_item([*BUILT, *SCHEDULES, *OUTSIDE, *TAKEN, *SPARSE, *IN_ONE_BIT], lambda row: row[2])
def test_what_is_wrong_is_named(row: Row) -> None:
    call, error, said = row
    with pytest.raises(error, match=said):
        call()


def test_groups_of_their_own_are_checked() -> None:
    optimizer = Lion([matrix()])
    with pytest.raises(ConfigError, match=r"Lion: betas is 0\.9; give two numbers"):
        optimizer.add_param_group({"params": [matrix()], "betas": 0.9})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [matrix()], "betas": [0.5, 0.6], "lr": torch.tensor(0.1)})
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    with pytest.raises(ConfigError, match=r"min_coeff is 0\.2 and max_coeff 0\.1"):
        Lamb([{"params": [matrix()], "min_coeff": 0.2}], max_coeff=0.1)
