"""Configuration of training techniques: curriculum learning, random layerwise token dropping,
progressive layer dropping, training phases; and training with low-bit weights.

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


QUANTIZE = "quantize_training"
EIGENVALUE = f"{QUANTIZE}.eigenvalue"
COMPRESSION = "compression_training"
QAT = "quantization_aware_training"
FLOAT8 = "float8_training"
AWARE = ("int4_weight", "int8_weight", "int8_dynamic_int4_weight", "int8_dynamic_int8_weight")
WEIGHTS = f"{COMPRESSION}.weight_quantization"
_TYPES = choice("symmetric", "asymmetric")
_ROUNDINGS = choice("nearest", "stochastic")

_moq = partial(key, idle=without(f"{QUANTIZE}.enabled"))
_eigenvalue = partial(key, idle=without(f"{EIGENVALUE}.enabled"))
_weights = partial(key, idle=without(f"{WEIGHTS}.shared_parameters.enabled"))


@dataclass(frozen=True)
class QuantizeTraining(FeatureSection):
    """Mixture of quantization (MoQ): blocks compute with weights whose number of bits decreases
    during training.
    """

    FIELD, SECTION_PATH = "quantize_training", QUANTIZE
    # of DeepSpeed's code, beside those of its tutorial
    SPELLINGS = {
        f"{QUANTIZE}.quantize-algo": f"{QUANTIZE}.quantize_algo",
        f"{QUANTIZE}.quantize_algo.q_type": f"{QUANTIZE}.quantize_type",
        f"{QUANTIZE}.quantize_algo.quantize_type": f"{QUANTIZE}.quantize_type",
        f"{QUANTIZE}.quantize_algo.rounding": f"{QUANTIZE}.quantize_rounding",
        f"{QUANTIZE}.quantize_algo.quantize_rounding": f"{QUANTIZE}.quantize_rounding",
    }

    enabled: bool = key(BOOLEAN, False)
    start_bits: int = _moq(integer(2, 16), 16, name="quantize_bits.start_bits", unit="bits")
    target_bits: int = _moq(integer(2, 16), 8, name="quantize_bits.target_bits", unit="bits")
    period: int = _moq(integer(1), 1000, name="quantize_schedule.quantize_period", unit="steps")
    offset: int = _moq(integer(0), 1000, name="quantize_schedule.schedule_offset", unit="steps")
    groups: int = _moq(integer(1), 1, name="quantize_groups", unit="groups")
    type: str = _moq(_TYPES, "symmetric", name="quantize_type")
    rounding: str = _moq(_ROUNDINGS, "nearest", name="quantize_rounding")
    mixed: bool = _moq(BOOLEAN, False, name="fp16_mixed_quantize.enabled")
    change_ratio: float = _moq(
        number(0, 1), 0.001, name="fp16_mixed_quantize.quantize_change_ratio"
    )
    verbose: bool = _moq(BOOLEAN, False, name="quantize_verbose")
    kernel: bool = key(BOOLEAN, name="quantizer_kernel")


@dataclass(frozen=True)
class EigenvalueSection(FeatureSection):
    """Eigenvalue schedule: the largest eigenvalue of a layer's Hessian stretches its periods."""

    FIELD, SECTION_PATH = "eigenvalue", EIGENVALUE

    enabled: bool = _moq(BOOLEAN, False)
    verbose: bool = _eigenvalue(BOOLEAN, False)
    max_iter: int = _eigenvalue(integer(1), 100, unit="iterations")
    tol: float = _eigenvalue(number(above=0), 1e-2)
    stability: float = _eigenvalue(number(0), 1e-6)
    gas_boundary_resolution: int = _eigenvalue(integer(1), 1, unit="steps")
    layer_name: str | None = _eigenvalue(TEXT, None)
    layer_num: int = _eigenvalue(integer(0), 0)


@dataclass(frozen=True)
class WeightQuantization(FeatureSection):
    """``compression_training.weight_quantization``: groups of modules, each with its own bits."""

    FIELD, SECTION_PATH = "compression_weights", WEIGHTS

    enabled: bool = key(BOOLEAN, False, name="shared_parameters.enabled")
    in_forward: bool = _weights(BOOLEAN, False, name="shared_parameters.quantize_weight_in_forward")
    offset: int = _weights(integer(0), 0, name="shared_parameters.schedule_offset", unit="steps")
    groups: int = _weights(integer(1), 1, name="shared_parameters.quantize_groups", unit="groups")
    type: str = _weights(_TYPES, "symmetric", name="shared_parameters.quantization_type")
    rounding: str = _weights(_ROUNDINGS, "nearest", name="shared_parameters.rounding")
    mixed: bool = _weights(BOOLEAN, False, name="shared_parameters.fp16_mixed_quantize.enabled")
    change_ratio: float = _weights(
        number(0, 1), 0.001, name="shared_parameters.fp16_mixed_quantize.quantize_change_ratio"
    )
    verbose: bool = _weights(BOOLEAN, False, name="shared_parameters.quantize_verbose")
    kernel: bool = key(BOOLEAN, name="shared_parameters.quantizer_kernel")
    different_groups: JsonObject | None = key(
        SECTION, None, idle=without(f"{WEIGHTS}.shared_parameters.enabled"), hash=False
    )


@dataclass(frozen=True)
class QuantizationAware(FeatureSection):
    """Quantization-aware training by torchao: linear layers of blocks simulate quantization."""

    FIELD, SECTION_PATH = "quantization_aware_training", QAT

    config: str | None = key(choice(*AWARE), None)
    group_size: int = key(
        integer(1),
        32,
        unit="elements",
        idle=lambda values: (
            "" if "int4" in str(values.get(f"{QAT}.config")) else "config has no int4 weights"
        ),
    )


@dataclass(frozen=True)
class Float8Training(FeatureSection):
    """Float8 training by torchao: linear layers of blocks compute in float8."""

    FIELD, SECTION_PATH = "float8_training", FLOAT8

    recipe: str | None = key(choice("tensorwise", "rowwise", "rowwise_with_gw_hp"), None)
    emulate: bool = key(
        BOOLEAN,
        False,
        idle=lambda values: "" if values.get(f"{FLOAT8}.recipe") else f"{FLOAT8}.recipe is null",
    )
    gather_weights: bool = key(BOOLEAN, False)
