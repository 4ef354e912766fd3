"""Curriculum learning by sequence length: each step trains on sequences truncated to the length of
its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.config.curriculum import LEGACY, LENGTHS, METRICS
from hf_zero.errors import ConfigError
from hf_zero.techniques.difficulty import DifficultySchedule
from hf_zero.techniques.sequence_length import SequenceLength
from hf_zero.zero.backward import Counters


class CurriculumLearning:
    """Cuts batches to the difficulty of the step that is being trained, ``global_steps + 1``;
    a :class:`hf_zero.techniques.registry.Technique`.
    """

    def __init__(self, settings: Mapping[str, Any], section: str, reshape: bool = False):
        self.schedule = DifficultySchedule(settings, section)
        self.sequences = SequenceLength(self.length, section, reshape)
        self._section = section
        self._counters = Counters()
        if self.schedule.schedule_type != "custom":
            self.length()

    def length(self) -> int:
        """Return the sequence length of the current step, in tokens. Raises ConfigError if it is
        below 1.
        """
        step = self._counters.global_steps + 1
        length = int(self.schedule.at(step))
        if length < 1:
            raise ConfigError(
                f"{self._section} makes sequences of {length} tokens for step {step}; write a "
                "min_difficulty of at least 1 that is not below difficulty_step"
            )
        return length

    @property
    def schedules(self) -> Mapping[str, DifficultySchedule]:
        """The schedule, by the name of the scheduled quantity."""
        return {self._section.rpartition(".")[2]: self.schedule}

    def install(self, engine: Any) -> None:
        self._counters = engine.counters
        if engine.optimizer is not None:
            self.sequences.install(engine.module)

    def end_step(self) -> None:
        """No-op: each forward computes its length from the counters."""

    def prepare_batch(self, batch: Any) -> Any:
        return self.sequences.cut(batch)

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state)

    def remove(self) -> None:
        self.sequences.remove()


def metrics_of(config: ZeroConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of each active metric; none if a switch is off."""
    switches = (config.data_efficiency.enabled, config.data_sampling.enabled)
    if not config.metric_curricula.enabled or False in switches:
        return {}
    return dict(config.metric_curricula.curriculum_metrics or {})


def of_config(config: ZeroConfig) -> CurriculumLearning | None:
    """Return the curriculum of ``config`` that truncates sequences, or None. Raises ConfigError if
    there are several.
    """
    metrics = metrics_of(config)
    lengths = [name for name in metrics if name in LENGTHS]
    if config.curriculum_learning.enabled:
        lengths.append(LEGACY)
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} each cut sequences to a length of their own; keep one"
        )
    if not lengths:
        return None
    if lengths == [LEGACY]:
        return CurriculumLearning(asdict(config.curriculum_learning), LEGACY)
    name = lengths[0]
    if metrics[name].get("difficulty_type", "value") != "value":
        raise ConfigError(
            f"{METRICS}.{name}.difficulty_type is {metrics[name]['difficulty_type']!r}, and a "
            "length of sequences is a value; write value"
        )
    return CurriculumLearning(metrics[name], f"{METRICS}.{name}", LENGTHS[name])
