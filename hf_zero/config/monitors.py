"""Sections of the monitors to which a script that imports deepspeed writes metrics of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, TEXT, Kind, integer
from hf_zero.config.rows import key, without

FIGURES = (
    "write loss, learning rate and loss scale of each step, and its times with "
    "wall_clock_breakdown, to {}; rank 0 of a script that imports deepspeed does, "
    "hf_zero.initialize refuses it"
)
JOB = "DeepSpeedJobName"
SECRETS = frozenset(("comet.api_key",))
"""Keys whose values are not shown."""
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def _folder(value: Any) -> str:
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ValueError(value)
    return str(value)


FOLDER = Kind("a path, or an empty string", _folder, {"type": "string"})


_tensorboard, _csv = without("tensorboard.enabled"), without("csv_monitor.enabled")
_wandb, _comet = without("wandb.enabled"), without("comet.enabled")


@dataclass(frozen=True)
class TensorBoardSection:
    """Event files of TensorBoard; requires its package."""

    enabled: bool = key(BOOLEAN, False, FIGURES.format("TensorBoard's event files"))
    output_path: str = key(
        FOLDER, "", "the folder in which that of job_name lies; empty: here", idle=_tensorboard
    )
    job_name: str = key(TEXT, JOB, "the folder of this job", idle=_tensorboard)


@dataclass(frozen=True)
class CsvSection:
    """One CSV file for each metric."""

    enabled: bool = key(BOOLEAN, False, FIGURES.format("a CSV file for each"))
    output_path: str = key(
        FOLDER, "", "the folder in which that of job_name lies; empty: here", idle=_csv
    )
    job_name: str = key(TEXT, JOB, "the folder of this job", idle=_csv)


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
        integer(1), 100, "samples between two values of one figure", unit="samples", idle=_comet
    )
    project: str | None = key(TEXT, None, "the project of the experiment", idle=_comet)
    workspace: str | None = key(TEXT, None, "the workspace of the project", idle=_comet)
    api_key: str | None = key(TEXT, None, "the key of the account", idle=_comet, repr=False)
    experiment_name: str | None = key(TEXT, None, "what the experiment is called", idle=_comet)
    experiment_key: str | None = key(TEXT, None, "the experiment that is gone on with", idle=_comet)
    online: bool | None = key(BOOLEAN, None, "false: kept on this machine", idle=_comet)
    mode: str | None = key(TEXT, None, '"get", "create" or "get_or_create"', idle=_comet)
