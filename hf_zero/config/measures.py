"""Configuration of what is measured of steps, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.value_types import (
    BOOLEAN,
    COUNT,
    NAMES,
    PATH,
    TEXT,
    ValueType,
    choice,
    integer,
    key,
    number,
    without,
)

JOB = "DeepSpeedJobName"
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def _folder(value: object) -> str:
    if (not isinstance(value, str) and not hasattr(value, "__fspath__")) or "\0" in str(value):
        raise ValueError(value)
    return str(value)


FOLDER = ValueType("a path, or an empty string", _folder, {"type": "string"})


_WITHOUT_METRICS = without("metrics.enabled")


@dataclass(frozen=True)
class MetricsSection(FeatureSection):
    """The figures of each step: a file of JSON lines, and the trackers of the script."""

    FIELD = SECTION_PATH = "metrics"

    enabled: bool = key(BOOLEAN, False)
    path: str | None = key(PATH, None, idle=_WITHOUT_METRICS)
    rotate_bytes: int = key(integer(1), 64 << 20, unit="bytes", idle=_WITHOUT_METRICS)
    peak_tflops: float | None = key(number(above=0), None)
    flops_per_token: float | None = key(number(above=0), None)


_WITHOUT_TRACE = without("trace.enabled")


@dataclass(frozen=True)
class TraceSection(FeatureSection):
    """A trace of a few steps, of all ranks in one file."""

    FIELD = SECTION_PATH = "trace"

    enabled: bool = key(BOOLEAN, False)
    first: int = key(integer(1), 5, unit="steps", idle=_WITHOUT_TRACE)
    steps: int = key(integer(1), 2, unit="steps", idle=_WITHOUT_TRACE)
    path: str = key(FOLDER, "", idle=_WITHOUT_TRACE)


_WITHOUT_LOG = without("comms_logger.enabled")


def _beside_all(values: Mapping[str, object]) -> str:
    """Return why names of collectives have no effect: all are measured."""
    if values.get("comms_logger.prof_all") is False:
        return _WITHOUT_LOG(values)
    return _WITHOUT_LOG(values) or "comms_logger.prof_all is true; write false"


@dataclass(frozen=True)
class CommsLoggerSection(FeatureSection):
    """Settings of the log of collectives."""

    FIELD = SECTION_PATH = "comms_logger"

    enabled: bool = key(BOOLEAN, False)
    verbose: bool = key(BOOLEAN, False, idle=_WITHOUT_LOG)
    prof_all: bool = key(BOOLEAN, True, idle=_WITHOUT_LOG)
    debug: bool | None = key(BOOLEAN)
    prof_ops: tuple[str, ...] = key(NAMES, (), idle=_beside_all)


_WITHOUT_PROFILE = without("flops_profiler.enabled")


@dataclass(frozen=True)
class FlopsProfilerSection(FeatureSection):
    """The profiled step, and the contents of the report."""

    FIELD = SECTION_PATH = "flops_profiler"

    enabled: bool = key(BOOLEAN, False)
    profile_step: int = key(integer(-1), 1, unit="steps", idle=_WITHOUT_PROFILE)
    module_depth: int = key(integer(-1), -1, idle=_WITHOUT_PROFILE)
    top_modules: int = key(COUNT, 1, idle=_WITHOUT_PROFILE)
    detailed: bool = key(BOOLEAN, True, idle=_WITHOUT_PROFILE)
    output_file: str | None = key(PATH, None, idle=_WITHOUT_PROFILE)
    recompute_fwd_factor: float | None = key(number(0))


_tensorboard, _csv = without("tensorboard.enabled"), without("csv_monitor.enabled")
_wandb, _comet = without("wandb.enabled"), without("comet.enabled")


@dataclass(frozen=True)
class TensorBoardSection(FeatureSection):
    """Event files of TensorBoard; requires its package."""

    FIELD = SECTION_PATH = "tensorboard"

    enabled: bool = key(BOOLEAN, False)
    output_path: str = key(FOLDER, "", idle=_tensorboard)
    job_name: str = key(TEXT, JOB, idle=_tensorboard)


@dataclass(frozen=True)
class CsvSection(FeatureSection):
    """One CSV file for each metric."""

    FIELD = SECTION_PATH = "csv_monitor"

    enabled: bool = key(BOOLEAN, False)
    output_path: str = key(FOLDER, "", idle=_csv)
    job_name: str = key(TEXT, JOB, idle=_csv)


@dataclass(frozen=True)
class WandbSection(FeatureSection):
    """Weights & Biases; requires its package."""

    FIELD = SECTION_PATH = "wandb"

    enabled: bool = key(BOOLEAN, False)
    group: str | None = key(TEXT, None, idle=_wandb)
    team: str | None = key(TEXT, None, idle=_wandb)
    project: str = key(TEXT, "deepspeed", idle=_wandb)


@dataclass(frozen=True)
class CometSection(FeatureSection):
    """Comet; requires its package. Fields that are None are read from Comet's own settings."""

    FIELD = SECTION_PATH = "comet"
    SECRETS = ("comet.api_key",)

    enabled: bool = key(BOOLEAN, False)
    samples_log_interval: int = key(integer(1), 100, unit="samples", idle=_comet)
    project: str | None = key(TEXT, None, idle=_comet)
    workspace: str | None = key(TEXT, None, idle=_comet)
    api_key: str | None = key(TEXT, None, idle=_comet, repr=False)
    experiment_name: str | None = key(TEXT, None, idle=_comet)
    experiment_key: str | None = key(TEXT, None, idle=_comet)
    online: bool | None = key(BOOLEAN, None, idle=_comet)
    mode: str | None = key(choice("get_or_create", "get", "create"), None, idle=_comet)
