"""The learning-rate range test and the one-cycle policy (Smith 2018, arXiv:1803.09820)."""

from __future__ import annotations

import math
import warnings
from typing import Any

from hf_zero.optim.schedule_base import LRSchedule, PerGroup


class LRRangeTest(LRSchedule):
    """A learning rate that only grows, to find the rate at which training diverges.

    Args:
        optimizer: the optimizer whose groups are written.
        lr_range_test_min_lr: learning rate at the start, one number or one per group.
        lr_range_test_step_size: optimizer steps of one interval.
        lr_range_test_step_rate: growth per interval, as a multiple of the start.
        lr_range_test_staircase: grow once an interval instead of every step.
        last_batch_iteration: the iteration to continue from; -1 starts anew and writes the first
            values.

    Raises:
        ConfigError: a value of the wrong type or range, or not one per group.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.min_lrs = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = self._count("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = self._number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = bool(lr_range_test_staircase)
        self._start(last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        intervals = (
            (iteration + 1) // self.step_size
            if self.staircase
            else (iteration + 1) / self.step_size
        )
        return [lr * (1.0 + self.step_rate * intervals) for lr in self.min_lrs]


class OneCycle(LRSchedule):
    """A rise from ``cycle_min_lr`` to ``cycle_max_lr``, a fall back, then a decay; momentum moves
    the other way.

    Momentum is the first of an optimizer's ``betas``; the second becomes 0.99 while momentum is
    cycled, as in DeepSpeed. For an optimizer without ``betas`` only the learning rate moves, with a
    warning.

    Args:
        optimizer: the optimizer whose groups are written.
        cycle_min_lr: lower learning rate, one number or one per group.
        cycle_max_lr: upper learning rate, likewise.
        decay_lr_rate: after the cycle the learning rate is ``cycle_min_lr / (1 + decay_lr_rate *
            intervals)``.
        cycle_first_step_size: optimizer steps of the rise, more than 0.
        cycle_second_step_size: optimizer steps of the fall; None for as many.
        cycle_first_stair_count: levels of the rise, 0 for a line.
        cycle_second_stair_count: levels of the fall; None for as many.
        decay_step_size: optimizer steps of one interval of the decay; 0 for no decay.
        cycle_momentum: whether to cycle momentum too.
        cycle_min_mom: lower momentum, one number or one per group.
        cycle_max_mom: upper momentum, likewise.
        decay_mom_rate: after the cycle momentum is ``cycle_max_mom * (1 + decay_mom_rate *
            intervals)``.
        last_batch_iteration: the iteration to continue from; -1 starts anew and writes the first
            values.

    Raises:
        ConfigError: a value of the wrong type or range, or not one per group.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        first = self._count("cycle_first_step_size", cycle_first_step_size, 1)
        second = (
            first
            if cycle_second_step_size is None
            else self._count("cycle_second_step_size", cycle_second_step_size)
        )
        stairs = self._count("cycle_first_stair_count", cycle_first_stair_count)
        second_stairs = (
            stairs
            if cycle_second_stair_count is None
            else self._count("cycle_second_stair_count", cycle_second_stair_count)
        )
        self.halves = ((first, stairs), (second, second_stairs))
        self.total_size = first + second
        self.decay_step_size = self._number("decay_step_size", decay_step_size)
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = self._number("decay_lr_rate", decay_lr_rate)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = self._number("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = bool(cycle_momentum)
        if self.cycle_momentum and not all(
            "betas" in group for group in self.optimizer.param_groups
        ):
            warnings.warn(
                f"OneCycle: {type(self.optimizer).__name__} has no betas, so momentum is not "
                "cycled; set cycle_momentum: false",
                stacklevel=2,
            )
            self.cycle_momentum = False
        self._start(last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        if iteration < 0:
            return list(self.min_lrs)
        if iteration < self.total_size:
            height = self._height(iteration)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        return [
            low / (1.0 + self.decay_lr_rate * self._intervals(iteration)) for low in self.min_lrs
        ]

    def moms_at(self, iteration: int) -> list[float]:
        """Return the momentum of each group at ``iteration``."""
        if iteration < 0:
            return list(self.min_moms)
        if iteration < self.total_size:
            height = self._height(iteration)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        return [
            high * (1.0 + self.decay_mom_rate * self._intervals(iteration))
            for high in self.max_moms
        ]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the ``betas`` of the current iteration, or None if momentum is not cycled. Before
        the first step these are the upper ones, the start of the cycle; as in DeepSpeed the groups
        hold the lower ones for that step.
        """
        if not self.cycle_momentum:
            return None
        begun = self.last_batch_iteration >= 0
        momenta = self.moms_at(self.last_batch_iteration) if begun else self.max_moms
        return [(momentum, 0.99) for momentum in momenta]

    @property
    def step_ratio(self) -> float:
        """The fraction of the cycle that is its rise."""
        return self.halves[0][0] / self.total_size

    def _height(self, iteration: int) -> float:
        """Return the height in the cycle at ``iteration``, from 0 (lower) to 1 (upper)."""
        place = (iteration + 1) % self.total_size
        rising = place <= self.halves[0][0]
        size, stairs = self.halves[0] if rising else self.halves[1]
        climbed = place if rising else self.total_size - place
        return math.floor(climbed * stairs / size) / stairs if stairs else climbed / size

    def _intervals(self, iteration: int) -> float:
        return (
            (iteration - self.total_size + 1) / self.decay_step_size
            if self.decay_step_size
            else 0.0
        )

    def _write(self) -> None:
        super()._write()
        if self.cycle_momentum:
            momenta = self.moms_at(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta):
                group["betas"] = (momentum, 0.99)
