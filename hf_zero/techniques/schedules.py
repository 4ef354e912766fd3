"""Schedules: quantities that are functions of the optimizer step, for all techniques.

A :class:`StepSchedule` has ``at(step)`` and no state, so that a resumed run computes what an
uninterrupted one does: :class:`Growth` (sequence lengths, difficulties, tokens that a block reads),
:class:`Stairs` (discrete difficulties, phases, sizes of batches), :class:`Decay` (layers that are
kept) and :class:`BitSchedule` (bits of weights). :class:`DifficultySchedule` chooses one by the
keys of curriculum learning, or calls a function of the script.

Curriculum learning: Bengio et al., 2009; by sequence length: Li, Zhang and He, "The
Stability-Efficiency Dilemma", 2022. Keys, formulas and their rounding are those of DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError
from hf_zero.optim.schedules import is_number

Number = int | float
T = TypeVar("T")
Value = TypeVar("Value", covariant=True)


class StepSchedule(Protocol[Value]):
    """A quantity that is a function of the step."""

    def at(self, step: int) -> Value: ...


@dataclass(frozen=True)
class Growth:
    """Growth from ``low`` at step 0 to ``high`` at step ``steps``, as a root of the step of degree
    ``degree``, in multiples of ``every``, and ``high`` afterwards. Before it reaches ``least`` it
    is ``least``.
    """

    low: Number
    high: Number
    steps: Number
    every: Number
    degree: Number = 1
    least: float = -math.inf

    def at(self, step: int) -> Number:
        if self.low == self.high:
            return self.low
        try:
            grown = (step / self.steps) ** (1.0 / self.degree)
            whole = math.floor(grown * (self.high - self.low) + self.low)
        except OverflowError:  # far above high
            return self.high
        return min(max(whole - whole % self.every, self.least), self.high)


@dataclass(frozen=True)
class Stairs(Generic[T]):
    """``values`` one after another: each but the last until its step in ``ends``, included."""

    values: Sequence[T]
    ends: Sequence[Number]

    def number(self, step: int) -> int:
        """Return the index of the value of ``step``."""
        return next((n for n, end in enumerate(self.ends) if step <= end), len(self.ends))

    def at(self, step: int) -> T:
        return self.values[self.number(step)]


@dataclass(frozen=True)
class Decay:
    """Exponential decay from 1 at step 0 towards ``end``, by ``rate`` a step."""

    end: float
    rate: float

    def at(self, step: int) -> float:
        return (1.0 - self.end) * math.exp(-self.rate * step) + self.end


@dataclass(frozen=True)
class Precision:
    """The bits of weights: ``bits`` since step ``since``, one less from step ``until`` on."""

    bits: int
    until: int
    since: int = 0


@dataclass(frozen=True)
class BitSchedule:
    """Bits that fall from ``start`` to ``target``, one at a time: the first at step ``period``,
    each later one at twice the step of the one before.
    """

    name: str  # section of the configuration
    start: int
    target: int
    period: int

    def begin(self) -> Precision:
        """Return the precision before the first step."""
        return Precision(self.start, self.period)

    def at(self, step: int) -> Precision:
        return self.after(self.begin(), step)

    def after(self, precision: Precision, step: int, factor: int = 1) -> Precision:
        """Return the precision at ``step`` that follows ``precision``, if each bit stays ``factor``
        times as long.
        """
        while precision.bits > self.target and step >= precision.until:
            precision = replace(
                precision,
                bits=precision.bits - 1,
                until=precision.until * 2 * factor,
                since=precision.until,
            )
        return precision


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
                f"{section}.schedule_type = {self.schedule_type!r} is not a schedule"
                f"{did_you_mean(self.schedule_type, _NEEDS)}"
            )
        self.min_difficulty = self._number("min_difficulty", settings["min_difficulty"], 0)
        self.max_difficulty = self._number("max_difficulty", settings["max_difficulty"], 0)
        if self.min_difficulty > self.max_difficulty:
            raise ConfigError(
                f"{section}.min_difficulty = {self.min_difficulty} is above max_difficulty = "
                f"{self.max_difficulty}; exchange them"
            )
        schedule_config = settings.get("schedule_config")
        if schedule_config is None:
            schedule_config = {}
        if not isinstance(schedule_config, Mapping):
            raise ConfigError(
                f"{section}.schedule_config = {schedule_config!r} is not a section of keys; write "
                "its keys there, or remove it"
            )
        for name in _NEEDS[self.schedule_type]:
            if schedule_config.get(name) is None:
                raise ConfigError(
                    f"{section}.schedule_config has no {name}, which {self.schedule_type} needs; "
                    f"write {section}.schedule_config.{name}"
                )
        # None: a custom function
        self._schedule = self._read(schedule_config)

    def at(self, step: int) -> Number:
        """Return the difficulty of optimizer step ``step``, counted from 1."""
        if self.min_difficulty == self.max_difficulty:
            return self.min_difficulty
        return self._custom(step) if self._schedule is None else self._schedule.at(step)

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

    def state_dict(self) -> dict[str, object]:
        """Return the state that the step does not give: the final value of a custom function."""
        reached = self._reached  # a number of numpy is none of JSON
        return {} if reached is None else {"reached": getattr(reached, "item", lambda: reached)()}

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
        if not is_number(difficulty):
            raise ConfigError(
                f"the function of {self._section} returned {difficulty!r} for step {step}; return "
                "the difficulty, a number"
            )
        if difficulty >= self.max_difficulty:
            self._reached = difficulty
        return difficulty

    def _read(self, settings: Mapping[str, object]) -> StepSchedule[Number] | None:
        section = "schedule_config."
        if self.schedule_type == "custom":
            return None
        if self.schedule_type == "fixed_discrete":
            difficulties = self._numbers(f"{section}difficulty", settings["difficulty"])
            last_steps = self._numbers(f"{section}max_step", settings["max_step"])
            if not last_steps or len(difficulties) != len(last_steps) + 1:
                raise ConfigError(
                    f"{self._section}.schedule_config has {len(difficulties)} difficulties and "
                    f"{len(last_steps)} of max_step; write one max_step for each difficulty but "
                    "the last, which stays"
                )
            whole_steps = [0, *map(math.floor, last_steps)]
            if any(later <= sooner for sooner, later in pairwise(whole_steps)):
                raise ConfigError(
                    f"{self._section}.{section}max_step = {last_steps} does not ascend, which "
                    "leaves out difficulties; write the last step of each, counted from the first"
                )
            # max_difficulty, once reached, stays
            reached = [at for at, d in enumerate(difficulties) if d >= self.max_difficulty]
            return Stairs(difficulties, last_steps[: min(reached, default=None)])
        low, high = self.min_difficulty, self.max_difficulty
        names = _NEEDS[self.schedule_type]
        return Growth(
            low, high, *(self._number(section + name, settings[name], above=0) for name in names)
        )

    def _numbers(self, name: str, value: object) -> list[Number]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{self._section}.{name} = {value!r} is not a list of numbers")
        return [self._number(name, item, 0) for item in value]

    def _number(
        self, name: str, value: Any, least: float = -math.inf, above: float = -math.inf
    ) -> Number:
        if not is_number(value) or value < least or value <= above:
            bound = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
            raise ConfigError(f"{self._section}.{name} = {value!r} is not a number {bound}")
        number: Number = value
        return number


def set_custom_schedule(
    features: Iterable[object], s: Callable[[int], float] | Mapping[str, Callable[[int], float]]
) -> None:
    """Set the functions of custom schedules of ``features``, by name, or one function for the only
    curriculum. Raises ConfigError if curriculum learning is off, or if a name is unknown or
    missing.
    """
    schedules: dict[str, DifficultySchedule] = {}
    for feature in features:
        schedules |= getattr(feature, "schedules", {})
    if not schedules:
        raise ConfigError(
            "a function was given as the schedule of curriculum learning, which is off; write "
            "curriculum_learning: {enabled: true, schedule_type: custom, …}, or drop the call"
        )
    if not isinstance(s, Mapping):
        custom = [name for name, s in schedules.items() if s.schedule_type == "custom"]
        s = dict.fromkeys(custom or schedules, s)
        if len(s) > 1:
            raise ConfigError(
                f"one function was given as the schedule of {' and '.join(s)}; pass "
                "functions by these names"
            )
    for name, function in s.items():
        if name not in schedules:
            raise ConfigError(
                f"a function was given as the schedule of {name}, but only "
                f"{' and '.join(schedules)} is scheduled; name that, or pass just the function"
            )
        schedules[name].set_function(function)
