"""Curriculum learning over difficulty, configured by two sections of DeepSpeed.

``curriculum_learning`` is a single schedule of the sequence length. ``data_efficiency`` holds one
schedule for each metric: the metrics in :data:`LENGTHS` truncate batches, all others select
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, COUNT, SECTION, TEXT, choice, integer
from hf_zero.config.rows import inert, key

LEGACY = "curriculum_learning"
EFFICIENCY = "data_efficiency"
SAMPLING = f"{EFFICIENCY}.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
METRICS = f"{CURRICULUM}.curriculum_metrics"
# Metrics that are sequence lengths; True if the rest of a sequence becomes further rows.
LENGTHS: Mapping[str, bool] = {"seqlen_truncate": False, "seqlen_reshape": True}
SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")


def _idle_legacy(values: Mapping[str, Any]) -> str:
    return "" if values.get(f"{LEGACY}.enabled") else f"{LEGACY}.enabled is false"


def _idle_metrics(values: Mapping[str, Any]) -> str:
    if not values.get(f"{CURRICULUM}.enabled"):
        return f"{CURRICULUM}.enabled is false"
    outer = (f"{path}.enabled" for path in (EFFICIENCY, SAMPLING))
    return next((f"{path} is false" for path in outer if values.get(path) is False), "")


@dataclass(frozen=True)
class CurriculumSection:
    """DeepSpeed's section of a single schedule: sequences are truncated to a growing length."""

    enabled: bool = key(BOOLEAN, False, "cut sequences to a length that grows with the steps")
    curriculum_type: str = key(
        choice("seqlen"), "seqlen", "what grows: the length of sequences", idle=_idle_legacy
    )
    min_difficulty: int | None = key(
        integer(1), None, "the length that training begins with", unit="tokens", idle=_idle_legacy
    )
    max_difficulty: int | None = key(
        integer(1), None, "the length that it ends with", unit="tokens", idle=_idle_legacy
    )
    schedule_type: str | None = key(
        choice(*SCHEDULES),
        None,
        "how the length grows; custom: engine.set_custom_curriculum_learning_schedule(function)",
        idle=_idle_legacy,
    )
    schedule_config: dict[str, Any] | None = key(
        SECTION,
        None,
        "total_curriculum_step and difficulty_step of fixed_linear and fixed_root, root_degree of "
        "fixed_root; lists difficulty and max_step of fixed_discrete",
        idle=_idle_legacy,
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
        idle=_idle_metrics,
        hash=False,
    )
