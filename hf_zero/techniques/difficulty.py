"""Difficulty schedules of curriculum learning: the difficulty admitted at each step.

Curriculum learning: Bengio et al., 2009; by sequence length: Li, Zhang and He, "The
Stability-Efficiency Dilemma", 2022. Keys, formulas and their rounding are those of DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError

Number = int | float

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class DifficultySchedule:
    """The difficulty of each step, from ``min_difficulty`` to ``max_difficulty`` and constant
    afterwards. It is a function of the step alone unless ``schedule_type`` is ``custom``.

    Args:
        settings: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and
            ``schedule_config``; other keys are ignored.
        section: name of the section in error messages.

    Raises:
        ConfigError: a missing key or an invalid value.
    """

    def __init__(self, settings: Mapping[str, Any], section: str):
        self._section = section
        self._function: Callable[[int], Number] | None = None
        # The first value of a custom function that is max_difficulty or more.
        self._reached: Number | None = None
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if settings.get(name) is None:
                raise ConfigError(f"{section} has no {name}; write {section}.{name}")
        self.schedule_type = str(settings["schedule_type"])
        if self.schedule_type not in _NEEDS:
            raise ConfigError(
                f"{section}.schedule_type = {self.schedule_type!r} is no schedule"
                f"{did_you_mean(self.schedule_type, _NEEDS)}"
            )
        self.min_difficulty = self._number("min_difficulty", settings["min_difficulty"], 0)
        self.max_difficulty = self._number("max_difficulty", settings["max_difficulty"], 0)
        if self.min_difficulty > self.max_difficulty:
            raise ConfigError(
                f"{section}.min_difficulty = {self.min_difficulty} is above max_difficulty = "
                f"{self.max_difficulty}; exchange them"
            )
        given = settings.get("schedule_config") or {}
        for name in _NEEDS[self.schedule_type]:
            if given.get(name) is None:
                raise ConfigError(
                    f"{section}.schedule_config has no {name}, which {self.schedule_type} needs; "
                    f"write {section}.schedule_config.{name}"
                )
        self._settings = self._checked(given)

    def at(self, step: int) -> Number:
        """Return the difficulty of optimizer step ``step``, counted from 1."""
        low, high = self.min_difficulty, self.max_difficulty
        if low == high:
            return low
        if self.schedule_type == "custom":
            return self._custom(step)
        settings = self._settings
        if self.schedule_type == "fixed_discrete":
            for difficulty, last in zip(settings["difficulty"], [*settings["max_step"], math.inf]):
                if step <= last or difficulty >= high:
                    return difficulty  # type: ignore[no-any-return]
        risen = (step / settings["total_curriculum_step"]) ** (1.0 / settings["root_degree"])
        whole = math.floor(risen * (high - low) + low)
        return min(whole - whole % settings["difficulty_step"], high)

    def set_function(self, function: Callable[[int], Number]) -> None:
        """Set the custom schedule: ``function(step)`` returns the difficulty of optimizer step
        ``step``, counted from 1 and equal on all ranks; it is called until it reaches
        ``max_difficulty``. Raises ConfigError unless ``schedule_type`` is ``custom``.
        """
        if self.schedule_type != "custom":
            raise ConfigError(
                f"{self._section}.schedule_type is {self.schedule_type!r}, and a function was "
                "given as its schedule; write custom, or leave the call out"
            )
        self._function = function

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the step does not determine: the final value of a custom
        function.
        """
        return {} if self._reached is None else {"reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reached = state.get("reached")

    def _custom(self, step: int) -> Number:
        if self._reached is not None:
            return self._reached
        if self._function is None:
            raise ConfigError(
                f"{self._section}.schedule_type is 'custom', and no function was given; call "
                "engine.set_custom_curriculum_learning_schedule(function) before training"
            )
        difficulty = self._function(step)
        if not _is_number(difficulty):
            raise ConfigError(
                f"the function of {self._section} returned {difficulty!r} for step {step}; return "
                "the difficulty, a number"
            )
        if difficulty >= self.max_difficulty:
            self._reached = difficulty
        return difficulty

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        section = "schedule_config."
        if self.schedule_type == "custom":
            return {}
        if self.schedule_type == "fixed_discrete":
            difficulties = self._numbers(f"{section}difficulty", given["difficulty"])
            last_steps = self._numbers(f"{section}max_step", given["max_step"])
            if not last_steps or len(difficulties) != len(last_steps) + 1:
                raise ConfigError(
                    f"{self._section}.schedule_config has {len(difficulties)} difficulties and "
                    f"{len(last_steps)} of max_step; write one max_step for each difficulty but "
                    "the last, which stays"
                )
            return {"difficulty": difficulties, "max_step": last_steps}
        linear = self.schedule_type == "fixed_linear"
        names = [name for name in _NEEDS["fixed_root"] if not (linear and name == "root_degree")]
        numbers = {name: self._number(section + name, given[name], above=0) for name in names}
        return {"root_degree": 1, **numbers}

    def _numbers(self, name: str, value: Any) -> list[Number]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{self._section}.{name} = {value!r} is no list of numbers")
        return [self._number(name, item, 0) for item in value]

    def _number(
        self, name: str, value: Any, least: float = -math.inf, above: float = -math.inf
    ) -> Number:
        if not _is_number(value) or value < least or value <= above:
            wanted = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
            raise ConfigError(f"{self._section}.{name} = {value!r} is not a number {wanted}")
        number: Number = value
        return number


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
