"""Configuration of training phases: sequences, batches and learning rates that change at given
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, Kind, choice, integer
from hf_zero.config.rows import key

PHASES = "training_phases"


def _phases(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(value)
    if not all(isinstance(phase, Mapping) and all(map(_is_name, phase)) for phase in value):
        raise ValueError(value)
    return [dict(phase) for phase in value]


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _rampup(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ValueError(value)
    return [integer(1).convert(number) for number in value]


_NUMBER = {"type": "integer", "minimum": 1}
PHASE_LIST = Kind(
    "a list of phases, each a section",
    _phases,
    {"type": "array", "minItems": 1, "items": {"type": "object"}},
)
RAMPUP = Kind(
    "a list of three numbers: samples at first, samples more each time, samples in all",
    _rampup,
    {"type": "array", "minItems": 3, "maxItems": 3, "items": _NUMBER},
)


def _idle_off(values: Mapping[str, Any]) -> str:
    if values.get(f"{PHASES}.phases") or values.get(f"{PHASES}.rampup_batch_size"):
        return ""
    return f"{PHASES} has neither phases nor rampup_batch_size"


@dataclass(frozen=True)
class TrainingPhasesSection:
    """Changes at given steps of one run; off without ``phases`` and ``rampup_batch_size``."""

    phases: list[dict[str, Any]] | None = key(
        PHASE_LIST,
        None,
        "one after another, each with its steps (the last may go on without) and what it changes: "
        "sequence_length, train_batch_size, train_micro_batch_size_per_gpu, lr_scale, "
        "warmup_steps, lr_decay_power",
        hash=False,
    )
    rampup_batch_size: list[int] | None = key(
        RAMPUP,
        None,
        "[start, increment, samples], as Megatron's: the samples of a step grow from start to "
        "train_batch_size while so many samples are trained on",
        hash=False,
    )
    lr_scaling_method: str = key(
        choice("none", "linear", "sqrt"),
        "none",
        "how the learning rate, which is that of train_batch_size, follows a smaller or larger "
        "batch",
        idle=_idle_off,
    )
    sequence_reshape: bool = key(
        BOOLEAN,
        False,
        "what is left of sequences that a phase cuts becomes further rows",
        idle=_idle_off,
    )
