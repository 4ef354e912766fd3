"""Schedules of difficulty are DeepSpeed's, number by number."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.errors import ConfigError
from hf_zero.techniques.schedules import DifficultySchedule

# What DeepSpeed 0.15.4 gives for steps 1 to 30.
LINEAR = [8] * 2 + [16] * 3 + [24] * 3 + [32] * 3 + [40] * 3 + [48] * 3 + [56] * 2 + [64] * 11
ODD = [8, 16, 20, 24, 32, 36, 44, 48, 52, 60] + [61] * 20
SQUARE_ROOT = [32, 48, 48, 56, 64, 72, 72, 80, 80, 88, 88, 88, 96, 96, 104, 104, 104]
SQUARE_ROOT += [112] * 3 + [120] * 3 + [128] * 7
CUBE_ROOT = [35, 44, 50, 55, 59, 63, 66, 69, 72, 74, 77, 79, 81, 83, 85, 87, 89, 90, 92, 94, 95]
CUBE_ROOT += [97, 98] + [100] * 7
DISCRETE = {"difficulty": [2, 5, 9], "max_step": [5, 10]}

CASES: dict[str, tuple[int, int, str, dict[str, Any], list[int]]] = {
    "linear": (
        8, 64, "fixed_linear", {"total_curriculum_step": 20, "difficulty_step": 8}, LINEAR,
    ),
    "limits that no step divides": (
        5, 61, "fixed_linear", {"total_curriculum_step": 10, "difficulty_step": 4}, ODD,
    ),
    "square root": (
        16, 128, "fixed_root",
        {"total_curriculum_step": 24, "difficulty_step": 8, "root_degree": 2}, SQUARE_ROOT,
    ),
    "cube root": (
        1, 100, "fixed_root",
        {"total_curriculum_step": 24, "difficulty_step": 1, "root_degree": 3}, CUBE_ROOT,
    ),
    "discrete": (1, 9, "fixed_discrete", DISCRETE, [2] * 5 + [5] * 5 + [9] * 20),
    "the largest one stays": (
        1, 9, "fixed_discrete", {"difficulty": [2, 9, 4], "max_step": [5, 10]}, [2] * 5 + [9] * 25,
    ),
    "nothing between": (
        13, 13, "fixed_linear", {"total_curriculum_step": 20, "difficulty_step": 8}, [13] * 30,
    ),
}  # fmt: skip


def schedule(low: Any, high: Any, kind: Any, config: Any = None) -> DifficultySchedule:
    settings = {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": kind,
        "schedule_config": config,
    }
    return DifficultySchedule(settings, "curriculum_learning")


@pytest.mark.parametrize("case", CASES)
def test_numbers(case):
    *settings, expected = CASES[case]
    made = schedule(*settings)
    assert [made.at(step) for step in range(1, 31)] == expected
    assert [made.at(step) for step in range(30, 0, -1)] == expected[::-1]  # no state
    assert made.state_dict() == {}


def test_a_function_of_the_script():
    made = schedule(8, 24, "custom")
    with pytest.raises(ConfigError, match=r"no function was given; call engine\.set_custom"):
        made.at(1)
    made.set_function(lambda step: 32 - abs(step - 6) * 4)
    assert [made.at(step) for step in range(1, 13)] == [12, 16, 20] + [24] * 9
    resumed = schedule(8, 24, "custom")
    resumed.set_function(lambda step: 8)
    assert resumed.at(5) == 8
    resumed.load_state_dict(made.state_dict())
    assert resumed.at(13) == 24

    made = schedule(8, 24, "custom")
    made.set_function(lambda step: "long")  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"returned 'long' for step 3; return the difficulty"):
        made.at(3)
    with pytest.raises(ConfigError, match="write custom, or leave the call out"):
        schedule(1, 9, "fixed_discrete", DISCRETE).set_function(lambda step: 8)


ROOT = {"total_curriculum_step": 20, "difficulty_step": 8, "root_degree": 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((None, 9, "custom"), r"has no min_difficulty; write curriculum_learning\.min_difficulty"),
        ((1, None, "custom"), "has no max_difficulty"),
        ((1, 9, None), "has no schedule_type"),
        ((9, 1, "custom"), "min_difficulty = 9 is above max_difficulty = 1; exchange them"),
        ((1, "9", "custom"), "max_difficulty = '9' is not a number of at least 0"),
        ((1, 9, "fixed_liner", ROOT), r"no schedule; did you mean 'fixed_linear'\?"),
        *(
            ((1, 9, "fixed_root", {**ROOT, name: None}), rf"no {name}, which fixed_root needs")
            for name in ROOT
        ),
        ((1, 9, "fixed_linear", {**ROOT, "difficulty_step": 0}), "= 0 is not a number above 0"),
        ((1, 9, "fixed_discrete", {"difficulty": [2, 5, 9]}), "no max_step"),
        ((1, 9, "fixed_discrete", {"difficulty": [9], "max_step": []}), "1 difficulties and 0 of"),
        ((1, 9, "fixed_discrete", {"difficulty": [1, 9], "max_step": [1, 2]}), "2 difficulties"),
        ((1, 9, "fixed_discrete", {"difficulty": 9, "max_step": [1]}), "= 9 is no list of numbers"),
    ],
)
def test_settings_that_are_no_schedule(settings, said):
    with pytest.raises(ConfigError, match=said):
        schedule(*settings)
