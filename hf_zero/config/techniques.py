"""Configuration of training techniques: curriculum learning, random layerwise token dropping,
progressive layer dropping, training phases.

``curriculum_learning`` is a single schedule of the sequence length. ``data_efficiency`` holds one
schedule for each metric: the metrics in :data:`LENGTHS` truncate batches, all others select
samples; its ``data_routing.random_ltd`` lets middle blocks read part of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.value_types import (
    BOOLEAN,
    COUNT,
    SECTION,
    SHARE,
    TEXT,
    ValueType,
    choice,
    integer,
    key,
    number,
    without,
)
from hf_zero.logging import JsonObject

CURRICULUM_LEARNING = "curriculum_learning"
EFFICIENCY = "data_efficiency"
SAMPLING = f"{EFFICIENCY}.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
METRICS = f"{CURRICULUM}.curriculum_metrics"
# Metrics that are sequence lengths; True if the rest of a sequence becomes further rows.
LENGTHS: Mapping[str, bool] = {"seqlen_truncate": False, "seqlen_reshape": True}
SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
ROUTING = f"{EFFICIENCY}.data_routing"
TOKEN_DROP = f"{ROUTING}.random_ltd"
SCHEDULE = "random_ltd_schedule"
MASK = "attention_mask"
ORDERS = ("batch_seq_dim", "seq_batch_dim")
LAYER_DROP = "progressive_layer_drop"
PHASES = "training_phases"
_LEGACY_OFF = without(f"{CURRICULUM_LEARNING}.enabled")
_METRICS_OFF = without(f"{CURRICULUM}.enabled", f"{EFFICIENCY}.enabled", f"{SAMPLING}.enabled")
_tokens = partial(
    key, idle=without(f"{TOKEN_DROP}.enabled", f"{EFFICIENCY}.enabled", f"{ROUTING}.enabled")
)
_LAYERS_KEPT = without(f"{LAYER_DROP}.enabled")


@dataclass(frozen=True)
class CurriculumSection(FeatureSection):
    """DeepSpeed's section of a single schedule: sequences are truncated to a growing length."""

    FIELD, SECTION_PATH = "curriculum_learning", CURRICULUM_LEARNING

    enabled: bool = key(BOOLEAN, False)
    curriculum_type: str = key(choice("seqlen"), "seqlen", idle=_LEGACY_OFF)
    min_difficulty: int | None = key(integer(1), None, unit="tokens", idle=_LEGACY_OFF)
    max_difficulty: int | None = key(integer(1), None, unit="tokens", idle=_LEGACY_OFF)
    schedule_type: str | None = key(choice(*SCHEDULES), None, idle=_LEGACY_OFF)
    schedule_config: JsonObject | None = key(SECTION, None, idle=_LEGACY_OFF, hash=False)


@dataclass(frozen=True)
class DataEfficiency(FeatureSection):
    """Master switch of data sampling and routing; ``enabled`` None: their own switches decide."""

    FIELD, SECTION_PATH = "data_efficiency", EFFICIENCY

    enabled: bool | None = key(BOOLEAN, None)
    seed: int = key(COUNT, 1234)


@dataclass(frozen=True)
class DataSampling(FeatureSection):
    """The master switch of curricula; ``enabled`` None: their own switches decide."""

    FIELD, SECTION_PATH = "data_sampling", SAMPLING

    enabled: bool | None = key(BOOLEAN, None)
    num_epochs: int | None = key(integer(1))
    num_workers: int = key(COUNT, 0)
    pin_memory: bool = key(BOOLEAN, False)


@dataclass(frozen=True)
class MetricCurricula(FeatureSection):
    """Schedules of difficulty by metric."""

    FIELD, SECTION_PATH = "metric_curricula", CURRICULUM

    enabled: bool = key(BOOLEAN, False)
    data_cluster_path: str | None = key(TEXT)
    curriculum_metrics: JsonObject | None = key(SECTION, None, idle=_METRICS_OFF, hash=False)


def curricula(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of each metric whose curriculum ``values``, by key, switch on."""
    switches = (values.get(f"{EFFICIENCY}.enabled"), values.get(f"{SAMPLING}.enabled"))
    metrics = values.get(f"{CURRICULUM}.curriculum_metrics")
    on = values.get(f"{CURRICULUM}.enabled") and False not in switches
    return metrics if on and isinstance(metrics, Mapping) else {}


def cuts_sequences(values: Mapping[str, object]) -> bool:
    """Return whether ``values``, by key, switch on a curriculum that cuts sequences."""
    return bool(values.get(f"{CURRICULUM_LEARNING}.enabled")) or any(
        name in LENGTHS for name in curricula(values)
    )


def selects_samples(values: Mapping[str, object]) -> bool:
    """Return whether ``values``, by key, switch on a curriculum that selects samples."""
    return any(name not in LENGTHS for name in curricula(values))


def _layers(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(value)
    return tuple(int(integer(0).convert(item)) for item in value)


LAYERS = ValueType(
    "a list of layers, counted from 0",
    _layers,
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
)


@dataclass(frozen=True)
class DataRouting(FeatureSection):
    """The master switch of token dropping; ``enabled`` None: its own switch decides."""

    FIELD, SECTION_PATH = "data_routing", ROUTING

    enabled: bool | None = key(BOOLEAN, None)


@dataclass(frozen=True)
class TokenDropSection(FeatureSection):
    """Random layerwise token dropping (arXiv 2211.11586): blocks read a random part of the tokens,
    which grows during training; see :mod:`hf_zero.techniques.token_drop`.
    """

    FIELD, SECTION_PATH = "random_ltd", TOKEN_DROP

    enabled: bool = key(BOOLEAN, False)
    total_layer_num: int | None = _tokens(integer(1), None, unit="blocks")
    random_ltd_layer_num: int | None = _tokens(integer(1), None, unit="blocks")
    random_ltd_layer_id: tuple[int, ...] | None = _tokens(LAYERS, None)
    model_mask_name: str = _tokens(TEXT, MASK)
    hidden_state_order: str = _tokens(choice(*ORDERS), ORDERS[0])
    min_value: int | None = _tokens(integer(1), None, name=f"{SCHEDULE}.min_value", unit="tokens")
    max_value: int | None = _tokens(integer(1), None, name=f"{SCHEDULE}.max_value", unit="tokens")
    schedule_type: str = _tokens(
        choice("fixed_linear"), "fixed_linear", name=f"{SCHEDULE}.schedule_type"
    )
    require_steps: int | None = _tokens(
        integer(1), None, name=f"{SCHEDULE}.schedule_config.require_steps", unit="steps"
    )
    seq_per_step: int | None = _tokens(
        integer(1), None, name=f"{SCHEDULE}.schedule_config.seq_per_step", unit="tokens"
    )
    model_type: str | None = key(choice("encoder", "decoder"))
    micro_batch_size: int | None = key(integer(1))
    global_batch_size: int | None = key(integer(1))


@dataclass(frozen=True)
class LayerDropSection(FeatureSection):
    """Progressive layer dropping (arXiv 2010.13369): training skips random blocks, deeper ones more
    often and more of them as it proceeds; see :mod:`hf_zero.techniques.layer_drop`.
    """

    FIELD, SECTION_PATH = "progressive_layer_drop", LAYER_DROP

    enabled: bool = key(BOOLEAN, False)
    theta: float = key(SHARE, 0.5, idle=_LAYERS_KEPT)
    gamma: float = key(number(0), 0.001, idle=_LAYERS_KEPT)
    per_rank: bool = key(BOOLEAN, False, idle=_LAYERS_KEPT)


def _phases(value: object) -> list[dict[str, object]]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(value)
    if not all(isinstance(phase, Mapping) and all(map(_is_name, phase)) for phase in value):
        raise ValueError(value)
    return [dict(phase) for phase in value]


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _rampup(value: object) -> list[int]:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ValueError(value)
    return [integer(1).convert(number) for number in value]


_NUMBER = {"type": "integer", "minimum": 1}
PHASE_LIST = ValueType(
    "a list of phases, each a section",
    _phases,
    {"type": "array", "minItems": 1, "items": {"type": "object"}},
)
RAMPUP = ValueType(
    "a list of three numbers: samples at first, samples more each time, samples in all",
    _rampup,
    {"type": "array", "minItems": 3, "maxItems": 3, "items": _NUMBER},
)


def _idle_off(values: Mapping[str, object]) -> str:
    if values.get(f"{PHASES}.phases") or values.get(f"{PHASES}.rampup_batch_size"):
        return ""
    return f"{PHASES} has neither phases nor rampup_batch_size"


@dataclass(frozen=True)
class TrainingPhasesSection(FeatureSection):
    """Changes at given steps of one run; off without ``phases`` and ``rampup_batch_size``."""

    FIELD, SECTION_PATH = "training_phases", PHASES

    phases: list[JsonObject] | None = key(PHASE_LIST, None, hash=False)
    rampup_batch_size: list[int] | None = key(RAMPUP, None, hash=False)
    lr_scaling_method: str = key(choice("none", "linear", "sqrt"), "none", idle=_idle_off)
    sequence_reshape: bool = key(BOOLEAN, False, idle=_idle_off)
