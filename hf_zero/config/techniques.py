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

    enabled: bool = key(BOOLEAN, False, "truncate sequences to a length that grows with the steps")
    curriculum_type: str = key(
        choice("seqlen"),
        "seqlen",
        "the quantity that grows: the length of sequences",
        idle=_LEGACY_OFF,
    )
    min_difficulty: int | None = key(
        integer(1), None, "the length at the beginning of training", unit="tokens", idle=_LEGACY_OFF
    )
    max_difficulty: int | None = key(
        integer(1), None, "the length at the end of the schedule", unit="tokens", idle=_LEGACY_OFF
    )
    schedule_type: str | None = key(
        choice(*SCHEDULES),
        None,
        "how the length grows; for custom, call "
        "engine.set_custom_curriculum_learning_schedule(function)",
        idle=_LEGACY_OFF,
    )
    schedule_config: dict[str, Any] | None = key(
        SECTION,
        None,
        "total_curriculum_step and difficulty_step for fixed_linear and fixed_root, "
        "root_degree for fixed_root, the lists difficulty and max_step for fixed_discrete",
        idle=_LEGACY_OFF,
        hash=False,
    )


@dataclass(frozen=True)
class DataEfficiency:
    """The master switch of data sampling and routing; ``enabled`` None: their own switches
    decide.
    """

    enabled: bool | None = key(BOOLEAN, None, "false disables the whole section")
    seed: int = key(COUNT, 1234, "the seed for random draws of this section")


@dataclass(frozen=True)
class DataSampling:
    """The master switch of curricula; ``enabled`` None: their own switches decide."""

    enabled: bool | None = key(BOOLEAN, None, "false disables all curricula of this section")
    num_epochs: int | None = key(
        integer(1),
        row=inert(
            "num_epochs",
            integer(1),
            "sampling never ends; the training loop decides when to stop",
        ),
    )
    num_workers: int = key(
        COUNT,
        0,
        (
            "number of worker processes of the loader that initialize(training_data=…) makes "
            "for samples drawn by difficulty"
        ),
    )
    pin_memory: bool = key(BOOLEAN, False, "put the batches of this loader into pinned memory")


@dataclass(frozen=True)
class MetricCurricula:
    """Schedules of difficulty by metric."""

    enabled: bool = key(BOOLEAN, False, "choose or truncate samples by the schedules of metrics")
    data_cluster_path: str | None = key(
        TEXT,
        row=inert(
            "data_cluster_path",
            TEXT,
            "hf-zero computes which samples it draws, and needs no files",
        ),
    )
    curriculum_metrics: dict[str, Any] | None = key(
        SECTION,
        None,
        "for each metric min_difficulty, max_difficulty, schedule_type and "
        "schedule_config; seqlen_truncate truncates sequences, seqlen_reshape turns the "
        "rest into further rows; any other metric selects samples, with "
        "index_to_metric_path, difficulty_type (value or percentile) and clustering_type",
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

    enabled: bool | None = key(BOOLEAN, None, "false disables the whole section")


@dataclass(frozen=True)
class TokenDropSection:
    """Random layerwise token dropping (arXiv 2211.11586): blocks read a random part of the tokens,
    which grows during training; see :mod:`hf_zero.techniques.token_drop`.
    """

    enabled: bool = key(
        BOOLEAN, False, "let some blocks process only a random subset of the tokens in training"
    )
    total_layer_num: int | None = key(
        integer(1),
        None,
        "number of blocks of the model; hf-zero checks it",
        unit="blocks",
        idle=_TOKENS_KEPT,
    )
    random_ltd_layer_num: int | None = key(
        integer(1),
        None,
        "number of blocks in random_ltd_layer_id",
        unit="blocks",
        idle=_TOKENS_KEPT,
    )
    random_ltd_layer_id: tuple[int, ...] | None = key(
        LAYERS,
        None,
        "the blocks that process a subset; null means all except the first and the last "
        "of each stack",
        idle=_TOKENS_KEPT,
    )
    model_mask_name: str = key(
        TEXT, MASK, "the name of the blocks' argument for the mask", idle=_TOKENS_KEPT
    )
    hidden_state_order: str = key(
        choice(*ORDERS),
        ORDERS[0],
        "the order of the dimensions of hidden states",
        idle=_TOKENS_KEPT,
    )
    min_value: int | None = key(
        integer(1),
        None,
        "number of tokens that these blocks process in the first step",
        name=f"{SCHEDULE}.min_value",
        unit="tokens",
        idle=_TOKENS_KEPT,
    )
    max_value: int | None = key(
        integer(1),
        None,
        "number of tokens that these blocks process in the end: the length of a sequence",
        name=f"{SCHEDULE}.max_value",
        unit="tokens",
        idle=_TOKENS_KEPT,
    )
    schedule_type: str = key(
        choice("fixed_linear"),
        "fixed_linear",
        "how the number of tokens grows",
        name=f"{SCHEDULE}.schedule_type",
        idle=_TOKENS_KEPT,
    )
    require_steps: int | None = key(
        integer(1),
        None,
        "number of steps until the number reaches max_value",
        name=f"{SCHEDULE}.schedule_config.require_steps",
        unit="steps",
        idle=_TOKENS_KEPT,
    )
    seq_per_step: int | None = key(
        integer(1),
        None,
        "the number of tokens is always a multiple of this",
        name=f"{SCHEDULE}.schedule_config.seq_per_step",
        unit="tokens",
        idle=_TOKENS_KEPT,
    )
    model_type: str | None = key(
        choice("encoder", "decoder"),
        row=inert(
            "model_type",
            choice("encoder", "decoder"),
            "tokens keep their order in all types of models",
        ),
    )
    micro_batch_size: int | None = key(
        integer(1),
        row=inert("micro_batch_size", integer(1), "hf-zero reads the size of each batch"),
    )
    global_batch_size: int | None = key(
        integer(1), row=inert("global_batch_size", integer(1), "hf-zero does not count tokens")
    )


@dataclass(frozen=True)
class LayerDropSection:
    """Progressive layer dropping (arXiv 2010.13369): training skips random blocks, deeper ones more
    often and more of them as it proceeds; see :mod:`hf_zero.techniques.layer_drop`.
    """

    enabled: bool = key(
        BOOLEAN,
        False,
        "skip blocks at random in training, and deeper blocks more often",
    )
    theta: float = key(
        SHARE,
        0.5,
        "the probability of keeping the last block at the end of training",
        idle=_LAYERS_KEPT,
    )
    gamma: float = key(
        number(0),
        0.001,
        "how fast this probability falls from 1 to theta, with exp(-gamma * step); 0 "
        "keeps all blocks",
        idle=_LAYERS_KEPT,
    )
    per_rank: bool = key(
        BOOLEAN,
        False,
        "each rank skips different blocks; false makes all ranks skip the same blocks, "
        "which they then neither gather nor reduce",
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
        "the phases in order; each has its steps (optional in the last) and the keys that "
        "it changes: sequence_length, train_batch_size, train_micro_batch_size_per_gpu, "
        "lr_scale, warmup_steps, lr_decay_power",
        hash=False,
    )
    rampup_batch_size: list[int] | None = key(
        RAMPUP,
        None,
        "[start, increment, samples], as in Megatron: the batch size grows from start to "
        "train_batch_size during the given number of samples",
        hash=False,
    )
    lr_scaling_method: str = key(
        choice("none", "linear", "sqrt"),
        "none",
        "how the learning rate, which is set for train_batch_size, changes with the batch "
        "size of a phase",
        idle=_idle_off,
    )
    sequence_reshape: bool = key(
        BOOLEAN,
        False,
        "turn the rest of sequences that a phase truncates into further rows",
        idle=_idle_off,
    )
