"""Base class of DeepSpeed's learning-rate schedules: it counts optimizer steps and writes the
groups' values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hf_zero.errors import ConfigError

PerGroup = float | Sequence[float]


class LRSchedule(LRScheduler, ABC):
    """A schedule whose values depend on the number of steps alone.

    Constructing it writes the values before the first step; ``step()`` after the n-th optimizer
    step writes those of iteration n - 1, as in DeepSpeed. It is a torch ``LRScheduler`` for
    isinstance, but does not run ``LRScheduler.__init__``, which would take a step of its own and
    wrap the optimizer's.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = _torch_optimizer(optimizer, type(self).__name__)
        self.last_batch_iteration = -1
        self.base_lrs: list[Any] = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._last_lr: list[Any] = list(self.base_lrs)

    def _start(self, last_batch_iteration: int) -> None:
        """Finish a constructor: -1 starts anew and writes the first values; from any other
        iteration the next step continues.
        """
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._write()

    @abstractmethod
    def lrs_at(self, iteration: int) -> list[float]:
        """Return the learning rate of each group at ``iteration``; iterations count from 0, and -1
        is before the first step.
        """

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The iteration, under the name that torch's schedulers use."""
        return self.last_batch_iteration

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the learning rates of the current iteration, computed anew."""
        return self.lrs_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """Return the learning rates that were written last, as numbers."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:  # type: ignore[override]
        """Advance to the next iteration, or to ``last_batch_iteration``, and write its values into
        the optimizer's groups.
        """
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the iteration to the saved one and write its values into the optimizer's groups."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        self._last_lr = [float(lr) for lr in self.get_lr()]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: Any) -> list[float]:
        groups = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
        if len(values) != groups or not all(_is_number(item) for item in values):
            raise ConfigError(
                f"{self._where(name)} is {value!r}; write a number, or a list of {groups} numbers, "
                "one for each parameter group"
            )
        return [float(item) for item in values]

    def _number(self, name: str, value: Any) -> float:
        if not _is_number(value):
            raise ConfigError(
                f"{self._where(name)} is {value!r}; write a number (YAML reads 1e-5 "
                "as text: write 1.0e-5)"
            )
        return float(value)

    def _count(self, name: str, value: Any, least: int = 0) -> int:
        if not _is_number(value) or value != math.floor(value) or value < least:
            raise ConfigError(
                f"{self._where(name)} is {value!r}; write a whole number of at least {least}"
            )
        return int(value)

    def _where(self, name: str) -> str:
        return f"scheduler.params.{name} of {type(self).__name__}"


def _torch_optimizer(optimizer: Any, schedule: str) -> torch.optim.Optimizer:
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise ConfigError(
        f"{schedule} needs a torch.optim.Optimizer, not a {type(optimizer).__name__}; pass the "
        "optimizer that is stepped"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
