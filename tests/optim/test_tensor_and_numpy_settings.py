"""Settings that are tensors, numbers of numpy, or more betas than two."""

import json

import numpy as np
import pytest
import torch

from hf_zero.optim.group_settings import scaled_rates
from hf_zero.optim.schedules import OneCycle
from hf_zero.techniques.schedules import DifficultySchedule


@pytest.mark.parametrize("shape", [(), (1,)])
def test_rates_in_tensors_of_one_element_are_scaled_and_restored(shape):
    rate = torch.full(shape, 0.5)
    groups = [{"lr": rate}]
    with scaled_rates(groups, 2.0):
        assert float(rate) == 1.0
    assert groups[0]["lr"] is rate and float(rate) == 0.5


def test_one_cycle_keeps_a_third_beta():
    group = {"params": [torch.nn.Parameter(torch.ones(1))], "betas": (0.9, 0.999, 0.9999)}
    optimizer = torch.optim.Optimizer([group], {"lr": 1e-3})
    OneCycle(optimizer, 1e-4, 1e-3)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99, 0.9999)


def test_state_of_a_custom_schedule_with_numbers_of_numpy_is_json():
    settings = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "custom"}
    schedule = DifficultySchedule(settings, "curriculum_learning")
    schedule.set_function(lambda step: np.minimum(64, 32 * step))
    assert schedule.at(2) == 64
    assert json.loads(json.dumps(schedule.state_dict())) == {"reached": 64}
