"""Configuration of training techniques: curriculum learning, random layerwise token dropping,
progressive layer dropping, training phases.

``curriculum_learning`` is a single schedule of the sequence length. ``data_efficiency`` holds one
schedule for each metric: the metrics in :data:`LENGTHS` truncate batches, all others select
samples; its ``data_routing.random_ltd`` lets middle blocks read part of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, COUNT, SECTION, SHARE, TEXT, Kind, choice, integer, number
from hf_zero.config.rows import inert, key, without

LEGACY = "curriculum_learning"
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
_LEGACY_OFF = without(f"{LEGACY}.enabled")
_METRICS_OFF = without(f"{CURRICULUM}.enabled", f"{EFFICIENCY}.enabled", f"{SAMPLING}.enabled")
_TOKENS_KEPT = without(f"{TOKEN_DROP}.enabled", f"{EFFICIENCY}.enabled", f"{ROUTING}.enabled")
_LAYERS_KEPT = without(f"{LAYER_DROP}.enabled")


@dataclass(frozen=True)
class CurriculumSection:
    """DeepSpeed's section of a single schedule: sequences are truncated to a growing length."""

    enabled: bool = key(BOOLEAN, False, "cut sequences to a length that grows with the steps")
    curriculum_type: str = key(
        choice("seqlen"), "seqlen", "what grows: the length of sequences", idle=_LEGACY_OFF
    )
    min_difficulty: int | None = key(
        integer(1), None, "the length that training begins with", unit="tokens", idle=_LEGACY_OFF
    )
    max_difficulty: int | None = key(
        integer(1), None, "the length that it ends with", unit="tokens", idle=_LEGACY_OFF
    )
    schedule_type: str | None = key(
        choice(*SCHEDULES),
        None,
        "how the length grows; custom: engine.set_custom_curriculum_learning_schedule(function)",
        idle=_LEGACY_OFF,
    )
    schedule_config: dict[str, Any] | None = key(
        SECTION,
        None,
        "total_curriculum_step and difficulty_step of fixed_linear and fixed_root, root_degree of "
        "fixed_root; lists difficulty and max_step of fixed_discrete",
        idle=_LEGACY_OFF,
        hash=False,
    )


@dataclass(frozen=True)
class DataEfficiency:
    """The master switch of data sampling and routing; ``enabled`` None: their own switches
    decide.
    """

    enabled: bool | None = key(BOOLEAN, None, "false: nothing of this section acts")
    seed: int = key(COUNT, 1234, "seed of what this section draws")


@dataclass(frozen=True)
class DataSampling:
    """The master switch of curricula; ``enabled`` None: their own switches decide."""

    enabled: bool | None = key(BOOLEAN, None, "false: no curriculum of this section acts")
    num_epochs: int | None = key(
        integer(1), row=inert("num_epochs", integer(1), "the draws have no end; the loop has")
    )
    num_workers: int = key(
        COUNT, 0, "processes that load what initialize(training_data=…) draws by difficulty"
    )
    pin_memory: bool = key(BOOLEAN, False, "whether its batches lie in pinned memory")


@dataclass(frozen=True)
class MetricCurricula:
    """Schedules of difficulty by metric."""

    enabled: bool = key(BOOLEAN, False, "curriculum learning by the schedules of metrics")
    data_cluster_path: str | None = key(
        TEXT, row=inert("data_cluster_path", TEXT, "draws are computed; no file keeps them")
    )
    curriculum_metrics: dict[str, Any] | None = key(
        SECTION,
        None,
        "by metric: min_difficulty, max_difficulty, schedule_type, schedule_config; "
        "seqlen_truncate cuts sequences to that length, seqlen_reshape makes the rest further "
        "rows; by any other samples are chosen: index_to_metric_path, difficulty_type (value or "
        "percentile), clustering_type",
        idle=_METRICS_OFF,
        hash=False,
    )


def _layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(value)
    return tuple(int(integer(0).convert(each)) for each in value)


LAYERS = Kind(
    "a list of layers, counted from 0",
    _layers,
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
)


@dataclass(frozen=True)
class DataRouting:
    """The master switch of token dropping; ``enabled`` None: its own switch decides."""

    enabled: bool | None = key(BOOLEAN, None, "false: nothing of this section acts")


@dataclass(frozen=True)
class TokenDropSection:
    """Random layerwise token dropping (arXiv 2211.11586): blocks read a random part of the tokens,
    which grows during training; see :mod:`hf_zero.techniques.token_drop`.
    """

    enabled: bool = key(
        BOOLEAN, False, "let chosen blocks read a random part of the tokens while the model trains"
    )
    total_layer_num: int | None = key(
        integer(1), None, "blocks of the model, which is checked", unit="blocks", idle=_TOKENS_KEPT
    )
    random_ltd_layer_num: int | None = key(
        integer(1),
        None,
        "how many blocks are in random_ltd_layer_id",
        unit="blocks",
        idle=_TOKENS_KEPT,
    )
    random_ltd_layer_id: tuple[int, ...] | None = key(
        LAYERS,
        None,
        "the blocks that read a part; null: all but the first and last of each stack",
        idle=_TOKENS_KEPT,
    )
    model_mask_name: str = key(
        TEXT, MASK, "the blocks' argument that holds the mask", idle=_TOKENS_KEPT
    )
    hidden_state_order: str = key(
        choice(*ORDERS),
        ORDERS[0],
        "which dimensions hidden states have",
        idle=_TOKENS_KEPT,
    )
    min_value: int | None = key(
        integer(1),
        None,
        "tokens that they read in the first step",
        name=f"{SCHEDULE}.min_value",
        unit="tokens",
        idle=_TOKENS_KEPT,
    )
    max_value: int | None = key(
        integer(1),
        None,
        "tokens that they read in the end: the length of a sequence",
        name=f"{SCHEDULE}.max_value",
        unit="tokens",
        idle=_TOKENS_KEPT,
    )
    schedule_type: str = key(
        choice("fixed_linear"),
        "fixed_linear",
        "how that number grows",
        name=f"{SCHEDULE}.schedule_type",
        idle=_TOKENS_KEPT,
    )
    require_steps: int | None = key(
        integer(1),
        None,
        "steps until max_value",
        name=f"{SCHEDULE}.schedule_config.require_steps",
        unit="steps",
        idle=_TOKENS_KEPT,
    )
    seq_per_step: int | None = key(
        integer(1),
        None,
        "the number is a multiple of this",
        name=f"{SCHEDULE}.schedule_config.seq_per_step",
        unit="tokens",
        idle=_TOKENS_KEPT,
    )
    model_type: str | None = key(
        choice("encoder", "decoder"),
        row=inert("model_type", choice("encoder", "decoder"), "tokens keep their order in both"),
    )
    micro_batch_size: int | None = key(
        integer(1), row=inert("micro_batch_size", integer(1), "each batch is looked at")
    )
    global_batch_size: int | None = key(
        integer(1), row=inert("global_batch_size", integer(1), "tokens are not counted")
    )


@dataclass(frozen=True)
class LayerDropSection:
    """Progressive layer dropping (arXiv 2010.13369): training skips random blocks, deeper ones more
    often and more of them as it proceeds; see :mod:`hf_zero.techniques.layer_drop`.
    """

    enabled: bool = key(
        BOOLEAN,
        False,
        "leave out blocks of the model at random while it trains, deeper ones more often",
    )
    theta: float = key(
        SHARE,
        0.5,
        "share of steps in which the last block is kept in the end",
        idle=_LAYERS_KEPT,
    )
    gamma: float = key(
        number(0),
        0.001,
        "how fast that share falls from 1 to theta, with exp(-gamma * step); 0: never",
        idle=_LAYERS_KEPT,
    )
    per_rank: bool = key(
        BOOLEAN,
        False,
        "each rank leaves out its own blocks; false: all ranks the same, which are then neither "
        "gathered nor reduced",
        idle=_LAYERS_KEPT,
    )


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
