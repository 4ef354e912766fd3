"""``deepspeed.utils.timer``: milliseconds by name, of the host or the device; samples a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hf_zero.config.value_types import argument, integer, number
from hf_zero.deepspeed.accelerator import get_accelerator
from hf_zero.deepspeed.logs import GIB, print_dist
from hf_zero.device import kinds
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.measures.comms_log import trim_mean


class Timer:
    """A timer for repeated starts and stops; both wait for the device. ``record`` is ignored."""

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
        if reset:
            self._milliseconds.clear()
        self._milliseconds.append((self._now() - self._begin) * 1e3)
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._milliseconds = []

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds since the last reset; a running timer continues."""
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
        """Return the mean of the times, without the shortest and the longest tenth of them: one
        ends with a stop, or with a call of :meth:`elapsed`.
        """
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
        return f"mem_allocated: {now:.4f} GiB | max_mem_allocated: {most:.4f} GiB"

    def log(
        self,
        names: str | Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print milliseconds of ``names``, divided by ``normalizer``, on rank 0 or ``ranks``.
        Raises ConfigError for a ``normalizer`` that is not above 0.
        """
        divisor = argument("log", "normalizer", number(above=0), normalizer)
        times = [
            f"{name}: {timer.elapsed(reset) / divisor:.2f}" for name, timer in self._named(names)
        ]
        more = [self.memory_usage()] if memory_breakdown else []
        print_dist(" | ".join(["time (ms)", *times, *more]), ranks or [0])

    def get_mean(
        self, names: str | Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Return :meth:`Timer.mean` of each existing timer, divided by ``normalizer``; ``reset`` is
        ignored. Raises ConfigError for a ``normalizer`` that is not above 0.
        """
        divisor = argument("get_mean", "normalizer", number(above=0), normalizer)
        return {name: timer.mean() / divisor for name, timer in self._named(names)}

    def _named(self, names: str | Sequence[str]) -> list[tuple[str, Timer]]:
        listed = [names] if isinstance(names, str) else names
        return [(name, self.timers[name]) for name in listed if name in self.timers]


SynchronizedWallClockTimer.Timer = Timer  # type: ignore[attr-defined]  # DeepSpeed's place for it


class ThroughputTimer:
    """Samples a second: ``start()`` and ``stop()`` around each micro-batch, with
    ``global_step=True`` around the last of a step of ``batch_size`` samples. It waits for the
    device, unless ``config.synchronized`` is False, and measures nothing if ``config.enabled`` is
    False.

    The first ``start_step`` steps are counted and not timed. ``total_elapsed_time``, in seconds,
    covers all others, ``step_elapsed_time`` the current step; after each ``steps_per_output`` steps
    ``logging_fn`` is called with the speed.
    """

    def __init__(
        self,
        config: object = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        self.config = config
        samples = 1 if batch_size is None else batch_size
        self.batch_size = argument("ThroughputTimer", "batch_size", integer(1), samples)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or logger.info
        self.initialized = self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.start_time = self.end_time = 0.0
        self.total_elapsed_time = self.step_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if not getattr(self.config, "enabled", True):
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stop the measurement; do nothing if it was not started."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:
            return
        self.end_time = self._now()
        took = self.end_time - self.start_time
        self.total_elapsed_time += took
        self.step_elapsed_time += took
        if not global_step:
            return
        every = self.steps_per_output
        if report_speed and every and self.global_step_count % every == 0:
            self.logging(
                f"step {self.global_step_count}: {self.batch_size / self.step_elapsed_time:.2f} "
                f"samples a second, {self.avg_samples_per_sec():.2f} on average"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the average speed; 0.0 before the first ``start_step`` steps are over."""
        timed = self.global_step_count - self.start_step
        return self.batch_size * timed / self.total_elapsed_time if self.total_elapsed_time else 0.0

    def _now(self) -> float:
        if getattr(self.config, "synchronized", True):
            kinds.synchronize(default_device())
        return time.perf_counter()
