"""``deepspeed.utils.timer``: milliseconds by name, of the host or of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hf_zero.device import kinds
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError
from hf_zero.integrations.deepspeed.accelerator import get_accelerator
from hf_zero.integrations.deepspeed.rank_logging import GIB, print_dist


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without this part of the smallest and of the largest values; 0.0 of none."""
    if not 0.0 <= trim_percent < 0.5:
        raise ConfigError(f"trim_percent is {trim_percent}; give a number in [0, 0.5)")
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0


class Timer:
    """A clock that is started and stopped any number of times; the device is waited for."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._begin = 0.0
        self._milliseconds: list[float] = []

    def start(self) -> None:
        if self.started_:
            raise ConfigError(f"the timer {self.name_} is running; stop it first")
        self._begin, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if not self.started_:
            raise ConfigError(f"the timer {self.name_} is not running; start it first")
        took = (self._now() - self._begin) * 1e3
        self._milliseconds = [took] if reset else [*self._milliseconds, took]
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._milliseconds = []

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds since the last reset; a clock that runs goes on."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._milliseconds)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds from a start to its stop, without a tenth of the extremes."""
        return trim_mean(self._milliseconds, 0.1)

    @staticmethod
    def _now() -> float:
        kinds.synchronize(default_device())
        return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        device = get_accelerator()
        now, most = device.memory_allocated() / GIB, device.max_memory_allocated() / GIB
        return f"mem_allocated: {now:.4f} GB | max_mem_allocated: {most:.4f} GB"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print milliseconds of ``names``, divided by ``normalizer``, on rank 0 or ``ranks``."""
        known = [name for name in names if name in self.timers]
        times = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known]
        more = [self.memory_usage()] if memory_breakdown else []
        print_dist(" | ".join(["time (ms)", *times, *more]), ranks or [0])

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Milliseconds from a start to its stop, of each timer that there is."""
        return {
            name: self.timers[name].mean() / normalizer for name in names if name in self.timers
        }


SynchronizedWallClockTimer.Timer = Timer  # type: ignore[attr-defined]  # DeepSpeed's place for it


class ThroughputTimer:
    """Samples a second: ``start()`` and ``stop(global_step=True)`` around each step."""

    def __init__(
        self,
        config: object = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: object = None,
    ) -> None:
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.global_step_count = 0
        self._timer = Timer("throughput")
        self._counted = 0

    def start(self) -> None:
        self._timer.start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        self._timer.stop(reset=self.global_step_count < self.start_step)
        if self.global_step_count >= self.start_step and global_step:
            self._counted += 1
        elif self.global_step_count < self.start_step:
            self._timer.reset()
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """0.0 before the first ``start_step`` steps are over."""
        seconds = self._timer.elapsed(reset=False) / 1e3
        return self._counted * self.batch_size / seconds if seconds and self._counted else 0.0


class NoopTimer:
    """Timers that measure nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None:
        """Nothing is measured."""

    def stop(self, **kwargs: object) -> None:
        """Nothing is measured."""

    reset = start

    def elapsed(self, **kwargs: object) -> float:
        return 0.0

    mean = elapsed

    def get_timers(self) -> dict[str, Timer]:
        return {}
