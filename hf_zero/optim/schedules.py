"""DeepSpeed's learning-rate schedules: warm-ups that then stay, fall linearly or along a cosine;
the range test and the one-cycle policy (Smith 2018, arXiv:1803.09820).

A schedule counts optimizer steps and writes the values of the groups. The section ``scheduler`` of
a configuration names one of these, or one of torch's that take only numbers.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import StateDict

from hf_zero.config.reading import Mistakes
from hf_zero.config.refusals import built_name
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError
from hf_zero.logging import listed

if TYPE_CHECKING:
    from hf_zero.config import SchedulerConfig

PerGroup = float | Sequence[float]


class LRSchedule(LRScheduler, ABC):
    """A schedule whose values depend on the number of steps alone.

    Constructing it writes the values before the first step; ``step()`` after the n-th optimizer
    step writes the values of iteration n - 1, as in DeepSpeed. It is a torch ``LRScheduler`` for
    isinstance, but does not run ``LRScheduler.__init__``, which would take a step of its own and
    wrap the optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = _torch_optimizer(optimizer, type(self).__name__)
        self.last_batch_iteration = -1
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(rate is None for rate in rates):
            raise ConfigError(
                f"{type(self).__name__} writes learning rates, and {type(self.optimizer).__name__} "
                "makes a rate of its own (lr is None); give it lr, or leave out the scheduler"
            )
        self.base_lrs: list[Any] = [float(rate) for rate in rates]
        self._last_lr: list[Any] = list(self.base_lrs)

    def _start(self, last_batch_iteration: int) -> None:
        """Finish a constructor: -1 starts anew and writes the first values; from any other
        iteration the next step continues.
        """
        self.last_batch_iteration = self._count("last_batch_iteration", last_batch_iteration, -1)
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

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to ``last_batch_iteration``, and write its values into
        the optimizer's groups.
        """
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = self._count("last_batch_iteration", last_batch_iteration, -1)
        self._write()

    def state_dict(self) -> StateDict:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set the iteration to the saved one and write its values into the optimizer's groups.
        Raises ConfigError for the state of a schedule that is none of these.
        """
        if "last_batch_iteration" not in state_dict:
            raise ConfigError(
                f"{type(self).__name__}: a state dict with {listed(state_dict, 6)} has no "
                "last_batch_iteration; load one of a schedule of DeepSpeed or hf-zero"
            )
        self.step(state_dict["last_batch_iteration"])

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
        if len(values) != groups or not all(is_number(item) for item in values):
            raise ConfigError(
                f"{self._where(name)} is {value!r}; write a number, or a list of {groups} numbers, "
                "one for each parameter group"
            )
        return [float(item) for item in values]

    def _number(self, name: str, value: object, least: float = -math.inf) -> float:
        if not is_number(value) or value < least:
            bound = f" of at least {least:g}" if least > -math.inf else ""
            raise ConfigError(
                f"{self._where(name)} is {value!r}; write a number{bound} (YAML reads 1e-5 "
                "as text: write 1.0e-5)"
            )
        return float(value)

    def _count(self, name: str, value: object, least: int = 0) -> int:
        if not is_number(value) or value != math.floor(value) or value < least:
            raise ConfigError(
                f"{self._where(name)} is {value!r}; write a whole number of at least {least}"
            )
        return int(value)

    def _where(self, name: str) -> str:
        return f"scheduler.params.{name} of {type(self).__name__}"


def _torch_optimizer(optimizer: object, schedule: str) -> torch.optim.Optimizer:
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise ConfigError(
        f"{schedule} needs a torch.optim.Optimizer, not a {type(optimizer).__name__}; pass the "
        "optimizer that is stepped"
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


class _Warmup(LRSchedule):
    """Base class of the three schedules: the rise from 0 to 1 over ``warmup_num_steps`` steps."""

    def _rise(self, steps: int, kind: str) -> None:
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
                f"{self.warmup_num_steps}; training ends before the warm-up does",
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
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = list(self.base_lrs)
        if warmup_max_lr is not None:
            self.max_lrs = self._per_group("warmup_max_lr", warmup_max_lr)
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
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = self._count("total_num_steps", total_num_steps)
        rise = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, *rise, last_batch_iteration)
        self._warn_if_short(self.total_num_steps)

    def _share(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return self._risen(iteration)
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - iteration) / fall)


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
        optimizer: torch.optim.Optimizer,
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
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = (iteration - self.warmup_num_steps + 1) / fall
        cosine = (1.0 + math.cos(math.pi * min(1.0, progress))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


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
        optimizer: torch.optim.Optimizer,
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

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        intervals = (iteration + 1) / self.step_size
        if self.staircase:
            intervals = (iteration + 1) // self.step_size
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
            intervals)``; at least 0.
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
        optimizer: torch.optim.Optimizer,
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
        stairs = self._count("cycle_first_stair_count", cycle_first_stair_count)
        second, second_stairs = first, stairs
        if cycle_second_step_size is not None:
            second = self._count("cycle_second_step_size", cycle_second_step_size)
        if cycle_second_stair_count is not None:
            second_stairs = self._count("cycle_second_stair_count", cycle_second_stair_count)
        self.halves = ((first, stairs), (second, second_stairs))
        self.total_size = first + second
        self.decay_step_size = self._number("decay_step_size", decay_step_size, 0.0)
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = self._number("decay_lr_rate", decay_lr_rate, 0.0)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = self._number("decay_mom_rate", decay_mom_rate)
        self.cycle_momentum = bool(cycle_momentum)
        has_betas = all("betas" in group for group in self.optimizer.param_groups)
        if self.cycle_momentum and not has_betas:
            warnings.warn(
                f"OneCycle: {type(self.optimizer).__name__} has no betas, so momentum is not "
                "cycled; set cycle_momentum: false",
                stacklevel=2,
            )
            self.cycle_momentum = False
        self._start(last_batch_iteration)

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)

    def lrs_at(self, iteration: int) -> list[float]:
        if iteration < 0:
            return list(self.min_lrs)
        if iteration < self.total_size:
            height = self._height(iteration)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        decay = 1.0 + self.decay_lr_rate * self._intervals(iteration)
        return [low / decay for low in self.min_lrs]

    def moms_at(self, iteration: int) -> list[float]:
        """Return the momentum of each group at ``iteration``."""
        if iteration < 0:
            return list(self.min_moms)
        if iteration < self.total_size:
            height = self._height(iteration)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        growth = 1.0 + self.decay_mom_rate * self._intervals(iteration)
        return [high * growth for high in self.max_moms]

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
        position = (iteration + 1) % self.total_size
        rising = position <= self.halves[0][0]
        size, stairs = self.halves[0] if rising else self.halves[1]
        climbed = position if rising else self.total_size - position
        return math.floor(climbed * stairs / size) / stairs if stairs else climbed / size

    def _intervals(self, iteration: int) -> float:
        size = self.decay_step_size
        return (iteration - self.total_size + 1) / size if size else 0.0

    def _write(self) -> None:
        super()._write()
        if self.cycle_momentum:
            momenta = self.moms_at(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta):
                group["betas"] = (momentum, 0.99, *group["betas"][2:])


SCHEDULES: dict[str, type[LRSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULES)


def schedule_class(name: str) -> type[LRScheduler]:
    """Return the class of the schedule ``name``, as the configuration spells it."""
    return SCHEDULES.get(name) or getattr(torch_schedules, name)


def check_schedule(
    name: str, params: Collection[str], later: Collection[str] = ()
) -> tuple[type[LRScheduler], dict[str, inspect.Parameter]]:
    """Return the class of a schedule and its parameters by name; raise ConfigError for others."""
    cls = schedule_class(name)
    keys = {
        key: p
        for key, p in inspect.signature(cls.__init__).parameters.items()
        if key not in ("self", "optimizer")
    }
    mistakes = Mistakes(
        ConfigError(f"unknown scheduler.params key {key!r} for {name}{did_you_mean(key, keys)}")
        for key in (*params, *later)
        if key not in keys
    )
    mistakes.throw()
    return cls, keys


def build_scheduler(cfg: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Build the schedule that ``cfg`` names, over ``optimizer``. Names are case-insensitive.

    Args:
        cfg: ``type`` and ``params`` of the configuration's ``scheduler`` section.
        optimizer: a torch optimizer, or an object that holds one as ``.optimizer``.

    Raises:
        ConfigError: a type or parameter that does not exist or is missing, an ``"auto"`` left over,
            a value of the wrong type or range.
        NotBuiltError: a schedule that cannot be described by numbers alone.
    """
    name = built_name("scheduler", cfg.type)
    params = dict(cfg.params)
    cls, parameters = check_schedule(name, params)
    for key, value in params.items():
        if isinstance(value, str) and value == "auto":
            raise ConfigError(
                f'scheduler.params.{key} of {name} is "auto" and nothing has filled it in; write a '
                "value, or set it in the trainer's arguments"
            )
    missing = [
        key
        for key, p in parameters.items()
        if p.default is inspect.Parameter.empty and key not in params
    ]
    if missing:
        raise ConfigError(
            f"scheduler {name} needs {', '.join(missing)}; write them in scheduler.params"
        )
    try:
        return cls(optimizer, **params)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"scheduler {name} with {params}: {error}. Correct scheduler.params."
        ) from error
