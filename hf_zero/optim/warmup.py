"""Schedules that rise from a small learning rate and then stay, fall linearly or fall along a
cosine.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError
from hf_zero.optim.schedule_base import LRSchedule, PerGroup


class _Warmup(LRSchedule):
    """Base class of the three schedules: the rise from 0 to 1 over ``warmup_num_steps`` steps."""

    def _rise(self, steps: Any, kind: Any) -> None:
        # At least 2: log(1) is 0, and 0 is what the Trainer fills in for no warm-up.
        self.warmup_num_steps = max(2, self._count("warmup_num_steps", steps))
        if kind not in ("log", "linear"):
            raise ConfigError(
                f"{self._where('warmup_type')} is "
                f"{kind!r}{did_you_mean(str(kind), ('log', 'linear'))}"
            )
        self.warmup_type = kind

    def _risen(self, iteration: int) -> float:
        if self.warmup_type == "linear":
            return iteration / self.warmup_num_steps
        return math.log(iteration + 1) / math.log(self.warmup_num_steps)

    def _warn_if_short(self, total: int) -> None:
        if total < self.warmup_num_steps:
            warnings.warn(
                f"{type(self).__name__}: total_num_steps {total} is less than warmup_num_steps "
                f"{self.warmup_num_steps}; "
                "training ends before the warm-up does",
                stacklevel=3,
            )


class WarmupLR(_Warmup):
    """A rise from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, then
    constant.

    Args:
        optimizer: the optimizer whose groups are written.
        warmup_min_lr: learning rate at the start, one number or one per group.
        warmup_max_lr: learning rate after the warm-up, likewise; None: the groups' current rates.
        warmup_num_steps: length of the warm-up in optimizer steps (0 and 1 count as 2).
        warmup_type: ``"log"`` (steep at first) or ``"linear"``.
        last_batch_iteration: the iteration to continue from; -1 starts anew and writes the first
            values.

    Raises:
        ConfigError: a value of the wrong type or range, or not one per group.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = (
            list(self.base_lrs)
            if warmup_max_lr is None
            else self._per_group("warmup_max_lr", warmup_max_lr)
        )
        self._rise(warmup_num_steps, warmup_type)
        self._start(last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        share = self._share(iteration) if iteration >= 0 else 0.0
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs)]

    def _share(self, iteration: int) -> float:
        return self._risen(iteration) if iteration < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """A rise as in :class:`WarmupLR`, then a linear fall to ``warmup_min_lr`` that ends at
    ``total_num_steps`` optimizer steps.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = self._count("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._warn_if_short(self.total_num_steps)

    def _share(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return self._risen(iteration)
        return max(
            0.0,
            (self.total_num_steps - iteration)
            / max(1, self.total_num_steps - self.warmup_num_steps),
        )


class WarmupCosineLR(_Warmup):
    """The optimizer's own learning rate times a ratio: a warm-up to 1, then half a cosine down to
    ``cos_min_ratio``.

    Args:
        optimizer: the optimizer whose groups are written; its current learning rates are
            multiplied.
        total_num_steps: optimizer steps in all.
        warmup_min_ratio: ratio at the start of the warm-up (before the first step the learning rate
            is 0).
        warmup_num_steps: length of the warm-up in optimizer steps (0 and 1 count as 2).
        cos_min_ratio: ratio at the end and after it.
        warmup_type: ``"log"`` (steep at first) or ``"linear"``.
        last_batch_iteration: the iteration to continue from; -1 starts anew and writes the first
            values.

    Raises:
        ConfigError: a value of the wrong type or range.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.total_num_steps = self._count("total_num_steps", total_num_steps)
        self.warmup_min_ratio = self._number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = self._number("cos_min_ratio", cos_min_ratio)
        self._rise(warmup_num_steps, warmup_type)
        self._warn_if_short(self.total_num_steps)
        self._start(last_batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        ratio = self._ratio(iteration)
        return [lr * ratio for lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the ratio of the current iteration; 0.0 before the first step."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._risen(iteration)
        done = (iteration - self.warmup_num_steps + 1) / max(
            1, self.total_num_steps - self.warmup_num_steps
        )
        cosine = (1.0 + math.cos(math.pi * min(1.0, done))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)
