"""Learning rates of DeepSpeed's schedules, against numbers from closed forms and worked by hand."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from hf_zero.config import SchedulerConfig
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.optim import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


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


def test_warmup_linear():
    schedule = WarmupLR(
        adam(), warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear"
    )
    assert curve(schedule, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_warmup_log():
    schedule = WarmupLR(adam(), warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=8)
    # log of 1, 2, 4 and 8 in units of log 8, and the cap from iteration 8 on
    got = curve(schedule, 10)
    assert [got[i] for i in (0, 1, 2, 4, 8, 9, 10)] == pytest.approx(
        [0.0, 0.0, 1 / 3, 2 / 3, 1.0, 1.0, 1.0]
    )
    assert got[3] == pytest.approx(math.log(3) / math.log(8))


def test_warmup_goes_to_the_learning_rate_of_each_group():
    schedule = WarmupLR(adam(0.5, 2.0), warmup_num_steps=2, warmup_type="linear")
    assert curve(schedule, 3, group=0) == [0.0, 0.0, 0.25, 0.5]
    assert schedule.get_last_lr() == [0.5, 2.0]
    schedule = WarmupLR(
        adam(0.5, 2.0), warmup_min_lr=[0.1, 0.2], warmup_max_lr=[1.0, 3.0], warmup_num_steps=2
    )
    assert curve(schedule, 3, group=1) == pytest.approx([0.2, 0.2, 3.0, 3.0])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_no_warm_up_counts_as_two_steps(steps):
    assert curve(WarmupLR(adam(), warmup_num_steps=steps, warmup_type="linear"), 3) == [
        0.0,
        0.0,
        0.25,
        0.5,
    ]


def test_warmup_decay():
    schedule = WarmupDecayLR(
        adam(), total_num_steps=8, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"
    )
    assert curve(schedule, 11) == pytest.approx(
        [0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0, 0]
    )
    schedule = WarmupDecayLR(
        adam(), total_num_steps=4, warmup_min_lr=0.2, warmup_num_steps=2, warmup_max_lr=1.0
    )
    assert curve(schedule, 5) == pytest.approx([0.2, 0.2, 1.0, 1.0, 0.6, 0.2])
    assert WarmupDecayLR(adam(), 1000).max_lrs == [0.001]
    assert curve(WarmupDecayLR(adam(0.3), 4, warmup_max_lr=None, warmup_num_steps=2), 3)[
        -1
    ] == pytest.approx(0.3)


def test_warmup_cosine():
    optimizer = adam(2.0, 4.0)
    schedule = WarmupCosineLR(
        optimizer, total_num_steps=6, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
    )
    half, down = (
        0.1 + 0.9 * 0.5,
        [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)],
    )
    assert down[1] == pytest.approx(half)
    assert curve(schedule, 8) == pytest.approx(
        [0.0, 0.0, 1.0, *(2 * ratio for ratio in down), 0.2, 0.2]
    )
    assert schedule.get_last_lr() == pytest.approx([0.2, 0.4])
    schedule = WarmupCosineLR(
        adam(1.0), total_num_steps=100, warmup_min_ratio=0.4, warmup_num_steps=4
    )
    assert curve(schedule, 4) == pytest.approx(
        [0.0, 0.4, 0.4 + 0.6 / 2, 0.4 + 0.6 * math.log(3) / math.log(4), 1.0]
    )


def test_lr_range_test():
    assert curve(LRRangeTest(adam(), 0.1, 2, 0.5), 5) == pytest.approx(
        [0.1, 0.125, 0.15, 0.175, 0.2, 0.225]
    )
    assert curve(LRRangeTest(adam(), 0.1, 2, 0.5, True), 5) == pytest.approx(
        [0.1, 0.1, 0.15, 0.15, 0.2, 0.2]
    )
    assert curve(LRRangeTest(adam(1.0, 1.0), [0.1, 0.2], 1), 2, group=1) == pytest.approx(
        [0.2, 0.4, 0.6]
    )


def test_one_cycle_moves_lr_and_momentum_against_each_other():
    schedule = OneCycle(
        adam(),
        0.1,
        0.9,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        decay_step_size=2,
        decay_lr_rate=1.0,
        decay_mom_rate=0.1,
    )
    momenta = [schedule.optimizer.param_groups[0]["betas"]]
    lrs = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(8):
        schedule.step()
        lrs.append(schedule.optimizer.param_groups[0]["lr"])
        momenta.append(schedule.optimizer.param_groups[0]["betas"])
    assert lrs == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9, 0.5, 0.1, 0.1 / 1.5, 0.1 / 2.0])
    assert [m for m, _ in momenta] == pytest.approx(
        [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    )
    assert {second for _, second in momenta} == {0.99}


def test_one_cycle_in_stairs_and_without_decay():
    schedule = OneCycle(
        adam(), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_momentum=False
    )
    assert curve(schedule, 10) == [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert (
        schedule.optimizer.param_groups[0]["betas"] == (0.9, 0.999) and schedule.get_mom() is None
    )
    schedule = OneCycle(
        adam(),
        0.0,
        1.0,
        cycle_first_step_size=2,
        cycle_second_step_size=0,
        cycle_second_stair_count=1,
    )
    assert schedule.get_mom() == [(0.9, 0.99)]  # what the cycle begins with
    assert schedule.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert curve(schedule, 4) == [0.0, 0.5, 0.0, 0.0, 0.0]
    assert schedule.get_mom() == [(0.9, 0.99)] and schedule.step_ratio == 1.0


def test_one_cycle_without_betas_warns():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.warns(
        UserWarning,
        match=r"OneCycle: SGD has no betas, so momentum is not cycled; set cycle_momentum: false",
    ):
        schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15)


PARAMS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.3,
        "cycle_first_step_size": 3,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
    },
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
}


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_resuming_gives_the_same_curve(name):
    whole = curve(build_scheduler(SchedulerConfig(name, PARAMS[name]), adam(0.7)), 10)
    first = build_scheduler(SchedulerConfig(name, PARAMS[name]), adam(0.7))
    curve(first, 4)
    saved = first.state_dict()
    assert saved == {"last_batch_iteration": 3}
    second = build_scheduler(SchedulerConfig(name.upper(), PARAMS[name]), adam(0.7))
    second.load_state_dict(saved)
    assert curve(second, 6) == whole[4:]
    third = build_scheduler(
        SchedulerConfig(name, {**PARAMS[name], "last_batch_iteration": 3}), adam(0.7)
    )
    assert third.get_last_lr() == [0.7]
    assert curve(third, 6)[1:] == whole[5:]
    third.step(0)
    assert third.get_last_lr()[0] == whole[1]


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_tensor_learning_rates_are_written_in_place(name):
    tensor = torch.tensor(0.7)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=tensor)
    want = curve(build_scheduler(SchedulerConfig(name, PARAMS[name]), adam(0.7)), 5)
    schedule = build_scheduler(SchedulerConfig(name, PARAMS[name]), optimizer)
    held = optimizer.param_groups[0]["lr"]
    for _ in range(5):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is held and held.item() == pytest.approx(want[-1])
    assert schedule.get_last_lr() == pytest.approx([want[-1]])


def test_they_are_torch_schedulers_and_find_the_optimizer_in_a_wrapper():
    class Wrapper:
        optimizer = adam(0.5)

    schedule = WarmupLR(Wrapper())
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert schedule.optimizer is Wrapper.optimizer and schedule.last_epoch == -1
    schedule.step()
    assert schedule.last_epoch == 0
    with pytest.raises(
        ConfigError,
        match=r"WarmupLR needs a torch.optim.Optimizer, not a int; pass the "
        r"optimizer that is stepped",
    ):
        WarmupLR(3)


def test_torchs_own_schedules_by_name():
    optimizer = adam(1.0)
    schedule = build_scheduler(SchedulerConfig("steplr", {"step_size": 1, "gamma": 0.1}), optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    with pytest.raises(
        ConfigError,
        match=r"scheduler OneCycleLR with \{'max_lr': 0.1\}: .*Correct scheduler.params",
    ):
        build_scheduler(SchedulerConfig("OneCycleLR", {"max_lr": 0.1}), optimizer)


def test_a_training_shorter_than_its_warm_up_warns():
    for cls in (WarmupDecayLR, WarmupCosineLR):
        with pytest.warns(
            UserWarning,
            match=rf"{cls.__name__}: total_num_steps 3 is less than warmup_num_steps 10",
        ):
            cls(adam(), 3, warmup_num_steps=10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cls(adam(), 10, warmup_num_steps=10)


@pytest.mark.parametrize(
    ("kind", "close"),
    [("WarmupDecay", "WarmupDecayLR"), ("OneCycel", "OneCycle"), ("warmup_lr_", "WarmupLR")],
)
def test_unknown_types_are_answered_with_the_nearest(kind, close):
    with pytest.raises(
        ConfigError, match=rf"unknown scheduler type '{kind}'; did you mean .*'{close}'"
    ):
        build_scheduler(SchedulerConfig(kind, {}), adam())


@pytest.mark.parametrize("kind", ["LambdaLR", "SequentialLR", "ReduceLROnPlateau"])
def test_schedules_that_numbers_cannot_describe(kind):
    with pytest.raises(
        NotBuiltError,
        match=rf"scheduler type '{kind}' is not built from a configuration: it takes "
        rf".*pass lr_scheduler=",
    ):
        build_scheduler(SchedulerConfig(kind.lower(), {}), adam())


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (
            "WarmupLR",
            {"warmup_steps": 3},
            r"unknown scheduler.params key 'warmup_steps' for WarmupLR; did you "
            r"mean 'warmup_num_steps'",
        ),
        (
            "WarmupLR",
            {"warmup_max_lr": "auto"},
            r'scheduler.params.warmup_max_lr of WarmupLR is "auto"',
        ),
        (
            "WarmupDecayLR",
            {},
            r"scheduler WarmupDecayLR needs total_num_steps; write them in scheduler.params",
        ),
        ("OneCycle", {"cycle_min_lr": 0.1}, r"OneCycle needs cycle_max_lr"),
        (
            "WarmupLR",
            {"warmup_type": "linaer"},
            r"warmup_type of WarmupLR is 'linaer'; did you mean 'linear'",
        ),
        (
            "WarmupLR",
            {"warmup_num_steps": -1},
            r"warmup_num_steps of WarmupLR is -1; write a whole number of at least 0",
        ),
        (
            "WarmupLR",
            {"warmup_num_steps": 2.5},
            r"warmup_num_steps of WarmupLR is 2.5; write a whole number",
        ),
        (
            "WarmupLR",
            {"warmup_max_lr": "1e-5"},
            r"warmup_max_lr of WarmupLR is '1e-5'; write a number, or a list of 1 numbers",
        ),
        (
            "WarmupLR",
            {"warmup_min_lr": [0.1, 0.2]},
            r"warmup_min_lr of WarmupLR is \[0.1, 0.2\]; write a number, or a list of 1",
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 10, "cos_min_ratio": "0"},
            r"cos_min_ratio of WarmupCosineLR is '0'; write a number",
        ),
        (
            "LRRangeTest",
            {"lr_range_test_step_size": 0},
            r"lr_range_test_step_size of LRRangeTest is 0; write a whole number of at least 1",
        ),
        (
            "LRRangeTest",
            {"lr_range_test_step_rate": None},
            r"lr_range_test_step_rate of LRRangeTest is None; write a number",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0},
            r"cycle_first_step_size of OneCycle is 0",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": float("nan")},
            r"cycle_max_lr of OneCycle is nan; write a number",
        ),
    ],
)
def test_bad_parameters_are_named(kind, params, message):
    with pytest.raises(ConfigError, match=message):
        build_scheduler(SchedulerConfig(kind, params), adam())


def test_the_ratio_of_a_cosine():
    schedule = WarmupCosineLR(adam(), 100, warmup_num_steps=10, warmup_min_ratio=0.0)
    assert schedule.get_lr_ratio() == 0.0
    (lr,) = schedule.base_lrs
    for _ in range(4):
        schedule.step()
        assert schedule.get_lr() == [lr * schedule.get_lr_ratio()]
    assert schedule.get_lr_ratio() == pytest.approx(math.log(4) / math.log(10))
