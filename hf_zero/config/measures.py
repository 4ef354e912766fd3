"""The sections of measures: figures, monitors, traces, profiles, the log of collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, COUNT, NAMES, PATH, TEXT, Kind, integer, number
from hf_zero.config.rows import inert, key, without

FIGURES = (
    "write the figures of each step to {}, on rank 0: loss, learning rate, gradient norm, loss "
    "scale, rates, bytes, waits; its times with wall_clock_breakdown"
)
JOB = "DeepSpeedJobName"
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def _folder(value: Any) -> str:
    if (not isinstance(value, str) and not hasattr(value, "__fspath__")) or "\0" in str(value):
        raise ValueError(value)
    return str(value)


FOLDER = Kind("a path, or an empty string", _folder, {"type": "string"})


_WITHOUT_METRICS = without("metrics.enabled")


@dataclass(frozen=True)
class MetricsSection:
    """The figures of each step: a file of JSON lines, and the trackers of the script."""

    enabled: bool = key(
        BOOLEAN,
        False,
        "collect the figures of each step; rank 0 writes them to metrics.jsonl and passes "
        "them to the trackers of Accelerate, the Trainer and Lightning",
    )
    path: str | None = key(
        PATH,
        None,
        "the folder of metrics.jsonl; null uses the folder of the checkpoints",
        idle=_WITHOUT_METRICS,
    )
    rotate_bytes: int = key(
        integer(1),
        64 << 20,
        "size of the file at which rank 0 starts another one",
        unit="bytes",
        idle=_WITHOUT_METRICS,
    )
    peak_tflops: float | None = key(
        number(above=0),
        None,
        "peak performance of one device in 10^12 operations per second, for the MFU; null "
        "uses the 16-bit peak of known devices",
    )
    flops_per_token: float | None = key(
        number(above=0),
        None,
        "operations of the whole model per token, forward and backward, for the MFU; null "
        "computes them from the parameters, except for mixtures of experts",
    )


_WITHOUT_TRACE = without("trace.enabled")


@dataclass(frozen=True)
class TraceSection:
    """A trace of a few steps, of all ranks in one file."""

    enabled: bool = key(
        BOOLEAN, False, "write a trace of some steps for Perfetto and chrome://tracing, on rank 0"
    )
    first: int = key(integer(1), 5, "the first traced step", unit="steps", idle=_WITHOUT_TRACE)
    steps: int = key(integer(1), 2, "number of traced steps", unit="steps", idle=_WITHOUT_TRACE)
    path: str = key(
        FOLDER, "", "the folder of the trace; empty means the working folder", idle=_WITHOUT_TRACE
    )


_WITHOUT_LOG = without("comms_logger.enabled")


@dataclass(frozen=True)
class CommsLoggerSection:
    """Settings of the log of collectives."""

    enabled: bool = key(
        BOOLEAN,
        False,
        "count the engine's collectives and the waits for them, by unit and group, and "
        "measure the time of collectives that the script calls through deepspeed.comm; "
        "rank 0 logs the counts every steps_per_print steps and at the end, and "
        "deepspeed.comm.log_summary() prints them",
    )
    verbose: bool = key(
        BOOLEAN, False, "log each collective of the script when it ends", idle=_WITHOUT_LOG
    )
    prof_all: bool = key(
        BOOLEAN,
        True,
        "measure all collectives of the script; false measures only those in prof_ops and "
        "calls with prof=True",
        idle=_WITHOUT_LOG,
    )
    debug: bool | None = key(
        BOOLEAN, row=inert("debug", BOOLEAN, "the log always has a call's name or log_name")
    )
    prof_ops: tuple[str, ...] = key(
        NAMES, (), "names of the collectives to measure if prof_all is false", idle=_WITHOUT_LOG
    )


_WITHOUT_PROFILE = without("flops_profiler.enabled")


@dataclass(frozen=True)
class FlopsProfilerSection:
    """The profiled step, and the contents of the report."""

    enabled: bool = key(
        BOOLEAN,
        False,
        "print the number of floating-point operations of the model's forward in one "
        "step, on rank 0",
    )
    profile_step: int = key(
        integer(-1),
        1,
        "number of steps before the profiled one; -1 profiles none",
        unit="steps",
        idle=_WITHOUT_PROFILE,
    )
    module_depth: int = key(
        integer(-1),
        -1,
        "the depth to which nested modules are listed; -1 lists all",
        idle=_WITHOUT_PROFILE,
    )
    top_modules: int = key(
        COUNT,
        1,
        "number of module classes to list at each depth, those with the most operations first",
        idle=_WITHOUT_PROFILE,
    )
    detailed: bool = key(BOOLEAN, True, "list each module, too", idle=_WITHOUT_PROFILE)
    output_file: str | None = key(
        PATH, None, "write the profile to this file and do not print it", idle=_WITHOUT_PROFILE
    )
    recompute_fwd_factor: float | None = key(
        number(0),
        row=inert("recompute_fwd_factor", number(0), "hf-zero does not profile backwards"),
    )


_tensorboard, _csv = without("tensorboard.enabled"), without("csv_monitor.enabled")
_wandb, _comet = without("wandb.enabled"), without("comet.enabled")


@dataclass(frozen=True)
class TensorBoardSection:
    """Event files of TensorBoard; requires its package."""

    enabled: bool = key(BOOLEAN, False, FIGURES.format("TensorBoard's event files"))
    output_path: str = key(
        FOLDER,
        "",
        "the folder that contains the folder of job_name; empty means the working folder",
        idle=_tensorboard,
    )
    job_name: str = key(TEXT, JOB, "the name of the folder of this job", idle=_tensorboard)


@dataclass(frozen=True)
class CsvSection:
    """One CSV file for each metric."""

    enabled: bool = key(BOOLEAN, False, FIGURES.format("a CSV file for each"))
    output_path: str = key(
        FOLDER,
        "",
        "the folder that contains the folder of job_name; empty means the working folder",
        idle=_csv,
    )
    job_name: str = key(TEXT, JOB, "the name of the folder of this job", idle=_csv)


@dataclass(frozen=True)
class WandbSection:
    """Weights & Biases; requires its package."""

    enabled: bool = key(BOOLEAN, False, FIGURES.format("Weights & Biases"))
    group: str | None = key(TEXT, None, "the group of the run", idle=_wandb)
    team: str | None = key(TEXT, None, "the entity that the run belongs to", idle=_wandb)
    project: str = key(TEXT, "deepspeed", "the project of the run", idle=_wandb)


@dataclass(frozen=True)
class CometSection:
    """Comet; requires its package. Fields that are None are read from Comet's own settings."""

    enabled: bool = key(BOOLEAN, False, FIGURES.format("Comet"))
    samples_log_interval: int = key(
        integer(1),
        100,
        "number of samples between two values of one figure",
        unit="samples",
        idle=_comet,
    )
    project: str | None = key(TEXT, None, "the project of the experiment", idle=_comet)
    workspace: str | None = key(TEXT, None, "the workspace of the project", idle=_comet)
    api_key: str | None = key(TEXT, None, "the key of the account", idle=_comet, repr=False)
    experiment_name: str | None = key(TEXT, None, "the name of the experiment", idle=_comet)
    experiment_key: str | None = key(TEXT, None, "the experiment to resume", idle=_comet)
    online: bool | None = key(
        BOOLEAN, None, "false stores the experiment on this machine only", idle=_comet
    )
    mode: str | None = key(TEXT, None, '"get", "create" or "get_or_create"', idle=_comet)
