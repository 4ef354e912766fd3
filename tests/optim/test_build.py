"""Optimizers by name from a configuration, in DeepSpeed's dialect and with torch's names; learning
rates of DeepSpeed's schedules, against numbers from closed forms and worked by hand.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from hf_zero.config import OptimizerConfig, SchedulerConfig
from hf_zero.optim import (
    VALID_LR_SCHEDULES,
    CPUAdagrad,
    CPUAdam,
    CPULion,
    Lion,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_optimizer,
    build_scheduler,
)
from tests.helpers.cells import in_one_item


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
HOST = {"CPUAdam": CPUAdam, "CPULion": CPULion, "CPUAdagrad": CPUAdagrad}


def test_classes_by_name_in_any_case():
    for name in TORCHS:
        for spelled in (name, name.lower(), name.upper()):
            assert type(build(spelled, lr=0.5)) is getattr(torch.optim, name)
    for name, cls in {**HOST, "DeepSpeedCPUAdam": CPUAdam}.items():
        assert type(build(name)) is cls
    for kind in ("Lion", "FusedLion"):
        optimizer = build(kind)
        (group,) = optimizer.param_groups
        assert type(optimizer) is Lion and (group["lr"], group["betas"]) == (1e-3, (0.9, 0.999))
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
    group = build("DeepSpeedCPULion").param_groups[0]
    assert (group["lr"], group["betas"]) == (1e-3, (0.9, 0.999))


def adam(*lrs):
    return torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (lrs or (0.5,))]
    )


def curve(schedule, steps, group=0):
    """The learning rate before the first step and after each of ``steps``."""
    seen = [schedule.optimizer.param_groups[group]["lr"]]
    for _ in range(steps):
        schedule.step()
        seen.append(schedule.optimizer.param_groups[group]["lr"])
        assert schedule.get_last_lr()[group] == seen[-1] == schedule.get_lr()[group]
    return [float(lr) for lr in seen]


LINEAR: dict[str, Any] = {"warmup_type": "linear"}


def test_warmup_linear_and_log():
    schedule = WarmupLR(adam(), warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, **LINEAR)
    assert curve(schedule, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    for steps in (0, 1, 2):  # no warm-up counts as two steps
        schedule = WarmupLR(adam(), warmup_num_steps=steps, **LINEAR)
        assert curve(schedule, 3) == [0.0, 0.0, 0.25, 0.5]
    # log of 1, 2, 4 and 8 in units of log 8, and the cap from iteration 8 on
    got = curve(WarmupLR(adam(), warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=8), 10)
    want = [0.0, 0.0, 1 / 3, math.log(3) / math.log(8), 2 / 3, 1.0, 1.0, 1.0]
    assert [got[i] for i in (0, 1, 2, 3, 4, 8, 9, 10)] == pytest.approx(want)


def test_warmup_goes_to_the_learning_rate_of_each_group():
    schedule = WarmupLR(adam(0.5, 2.0), warmup_num_steps=2, **LINEAR)
    assert curve(schedule, 3, group=0) == [0.0, 0.0, 0.25, 0.5]
    assert schedule.get_last_lr() == [0.5, 2.0]
    schedule = WarmupLR(adam(0.5, 2.0), [0.1, 0.2], [1.0, 3.0], 2)
    assert curve(schedule, 3, group=1) == pytest.approx([0.2, 0.2, 3.0, 3.0])


def test_warmup_decay():
    schedule = WarmupDecayLR(adam(), 8, warmup_max_lr=1.0, warmup_num_steps=4, **LINEAR)
    down = [0.75, 0.5, 0.25, 0, 0, 0]
    assert curve(schedule, 11) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1.0, *down])
    given: dict[str, Any] = {"warmup_num_steps": 2, "warmup_max_lr": 1.0}
    schedule = WarmupDecayLR(adam(), 4, warmup_min_lr=0.2, **given)
    assert curve(schedule, 5) == pytest.approx([0.2, 0.2, 1.0, 1.0, 0.6, 0.2])
    assert WarmupDecayLR(adam(), 1000).max_lrs == [0.001]
    schedule = WarmupDecayLR(adam(0.3), 4, warmup_max_lr=None, warmup_num_steps=2)
    assert curve(schedule, 3)[-1] == pytest.approx(0.3)


def test_warmup_cosine():
    optimizer = adam(2.0, 4.0)
    schedule = WarmupCosineLR(optimizer, 6, warmup_num_steps=2, cos_min_ratio=0.1, **LINEAR)
    down = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert down[1] == pytest.approx(0.1 + 0.9 * 0.5)
    want = [0.0, 0.0, 1.0, *(2 * ratio for ratio in down), 0.2, 0.2]
    assert curve(schedule, 8) == pytest.approx(want)
    assert schedule.get_last_lr() == pytest.approx([0.2, 0.4])
    schedule = WarmupCosineLR(adam(1.0), 100, warmup_min_ratio=0.4, warmup_num_steps=4)
    want = [0.0, 0.4, 0.4 + 0.6 / 2, 0.4 + 0.6 * math.log(3) / math.log(4), 1.0]
    assert curve(schedule, 4) == pytest.approx(want)
    schedule = WarmupCosineLR(adam(), 100, warmup_num_steps=10, warmup_min_ratio=0.0)
    assert schedule.get_lr_ratio() == 0.0
    (lr,) = schedule.base_lrs
    for _ in range(4):
        schedule.step()
        assert schedule.get_lr() == [lr * schedule.get_lr_ratio()]
    assert schedule.get_lr_ratio() == pytest.approx(math.log(4) / math.log(10))


def test_lr_range_test():
    rising = [0.1, 0.125, 0.15, 0.175, 0.2, 0.225]
    assert curve(LRRangeTest(adam(), 0.1, 2, 0.5), 5) == pytest.approx(rising)
    stairs = [0.1, 0.1, 0.15, 0.15, 0.2, 0.2]
    assert curve(LRRangeTest(adam(), 0.1, 2, 0.5, True), 5) == pytest.approx(stairs)
    of_groups = curve(LRRangeTest(adam(1.0, 1.0), [0.1, 0.2], 1), 2, group=1)
    assert of_groups == pytest.approx([0.2, 0.4, 0.6])


def test_the_host_kernel_takes_the_momenta_of_a_decaying_cycle() -> None:
    """They pass 1, as in torch."""
    weights = []
    for make in (CPUAdam, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))
        optimizer = make([weight], lr=0.1, weight_decay=0.0)
        sizes = {"cycle_first_step_size": 2, "decay_step_size": 1}
        schedule = OneCycle(optimizer, 0.1, 0.9, **sizes, decay_mom_rate=0.1)
        for step in range(12):
            weight.grad = torch.full_like(weight, 0.1 * (step + 1))
            optimizer.step()
            schedule.step()
        weights.append(weight.detach())
        assert optimizer.param_groups[0]["betas"][0] > 1
    torch.testing.assert_close(*weights)


def test_one_cycle_moves_lr_and_momentum_against_each_other():
    sizes = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "decay_step_size": 2}
    schedule = OneCycle(adam(), 0.1, 0.9, **sizes, decay_lr_rate=1.0, decay_mom_rate=0.1)
    momenta, lrs = [schedule.optimizer.param_groups[0]["betas"]], curve(schedule, 0)
    for _ in range(8):
        lrs.append(curve(schedule, 1)[1])
        momenta.append(schedule.optimizer.param_groups[0]["betas"])
    assert lrs == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9, 0.5, 0.1, 0.1 / 1.5, 0.1 / 2.0])
    want = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    assert [m for m, _ in momenta] == pytest.approx(want)
    assert {second for _, second in momenta} == {0.99}
    for jumping in (schedule, LRRangeTest(adam())):
        jumping.step(batch_iteration=3)
        assert jumping.last_batch_iteration == 3


def test_one_cycle_in_stairs_and_without_decay():
    stairs = {"cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    schedule = OneCycle(adam(), 0.0, 1.0, **stairs, cycle_momentum=False)
    assert curve(schedule, 10) == [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    group = schedule.optimizer.param_groups[0]
    assert group["betas"] == (0.9, 0.999) and schedule.get_mom() is None
    sizes = {"cycle_first_step_size": 2, "cycle_second_step_size": 0}
    schedule = OneCycle(adam(), 0.0, 1.0, **sizes, cycle_second_stair_count=1)
    assert schedule.get_mom() == [(0.9, 0.99)]  # what the cycle begins with
    assert schedule.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert curve(schedule, 4) == [0.0, 0.5, 0.0, 0.0, 0.0]
    assert schedule.get_mom() == [(0.9, 0.99)] and schedule.step_ratio == 1.0


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 3}
PARAMS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5},
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
}


def made(name, optimizer=None, **more):
    return build_scheduler(SchedulerConfig(name, {**PARAMS[name], **more}), optimizer or adam(0.7))


@in_one_item(VALID_LR_SCHEDULES)
def test_resuming_gives_the_same_curve(name):
    whole, first = curve(made(name), 10), made(name)
    curve(first, 4)
    saved = first.state_dict()
    assert saved == {"last_batch_iteration": 3}
    second = build_scheduler(SchedulerConfig(name.upper(), PARAMS[name]), adam(0.7))
    second.load_state_dict(saved)
    assert curve(second, 6) == whole[4:]
    third = made(name, last_batch_iteration=3)
    assert third.get_last_lr() == [0.7]
    assert curve(third, 6)[1:] == whole[5:]
    third.step(0)
    assert third.get_last_lr()[0] == whole[1]
    # a rate that is a tensor is written in place
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.7))
    held, fourth = optimizer.param_groups[0]["lr"], made(name, optimizer)
    for _ in range(5):
        fourth.step()
    assert optimizer.param_groups[0]["lr"] is held and held.item() == pytest.approx(whole[5])
    assert fourth.get_last_lr() == pytest.approx([whole[5]])


def test_they_are_torch_schedulers_and_find_the_optimizer_in_a_wrapper():
    """Warned of: momentum of an optimizer without betas, a training shorter than its warm-up."""
    wrapper = type("Wrapper", (), {"optimizer": adam(0.5)})
    schedule = WarmupLR(wrapper())
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert schedule.optimizer is wrapper.optimizer and schedule.last_epoch == -1
    schedule.step()
    assert schedule.last_epoch == 0
    theirs = build_scheduler(SchedulerConfig("steplr", {"step_size": 1, "gamma": 0.1}), adam(1.0))
    assert isinstance(theirs, torch.optim.lr_scheduler.StepLR)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.warns(UserWarning, match="OneCycle: SGD has no betas"):
        schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
    for cls in (WarmupDecayLR, WarmupCosineLR):
        with pytest.warns(UserWarning, match=f"{cls.__name__}: total_num_steps 3 .* 10"):
            cls(adam(), 3, warmup_num_steps=10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cls(adam(), 10, warmup_num_steps=10)
