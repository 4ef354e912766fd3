"""A run as its folder shows it: figures, headers, warnings, totals, and the last trace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from hf_zero.errors import ConfigError
from hf_zero.measures.metrics_file import NAME, MetricsReader, files_of
from hf_zero.report.rows import LEVELS, problem_of

TRACES = "trace-steps-*.json.gz"
TRACE_STEPS = re.compile(r"trace-steps-(\d{1,18})-(\d{1,18})\.json\.gz")
SPEEDS = (
    "step_ms", "forward_ms", "backward_ms", "update_ms", "gather_wait_ms", "reduction_wait_ms",
    "samples_per_second", "tokens_per_second", "mfu",
)  # fmt: skip


@dataclass(frozen=True)
class LoggedMessage:
    """A warning or an error of rank 0, after step ``after``."""

    level: str
    text: str
    after: int
    time: str


@dataclass(frozen=True)
class RankStates:
    """The states of all ranks while rank 0 waited at ``time``: rows of ``state_rows.py``."""

    time: str
    groups: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunStart:
    """A start of the run, after step ``after``; ``repeated``: steps that it took again. ``header``:
    versions, hosts, configuration and so on (``measures/run_record.py``).
    """

    after: int
    repeated: int
    header: Mapping[str, object]

    @property
    def time(self) -> str:
        """The time of the start, UTC: ``2026-11-23 18:02:11``."""
        return str(self.header["started"]).replace("T", " ").removesuffix("+00:00")


@dataclass(frozen=True)
class RecordedRun:
    """The run in ``folder``. ``steps``: figures of each step. ``totals``: collectives and bytes of
    state when a checkpoint was last saved or the engine ended; empty if neither has happened.
    ``evaluations``: results by name and the "step" after which they were taken, None if not finite.
    ``trace``: the file of its last trace. ``traced``: the first and the last step of each trace;
    these steps have no figures of speed, which tracing slows. ``planned_steps``: those of the whole
    run, None if it has not recorded them. ``ranks``: since the last step; None if all have run.
    ``ended``: the error that ended the run, empty for an end without one; None if the run has not
    ended, or was killed. ``updated``: when the file was last written, in seconds since 1970.
    """

    name: str
    folder: Path
    steps: Sequence[Mapping[str, Any]]
    starts: Sequence[RunStart] = ()
    messages: Sequence[LoggedMessage] = ()
    totals: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()
    trace: Path | None = None
    traced: Sequence[tuple[int, int]] = ()
    planned_steps: int | None = None
    ranks: RankStates | None = None
    ended: str | None = None
    updated: float = 0.0

    @property
    def header(self) -> Mapping[str, Any]:
        """The header of the last start; empty if the run has none."""
        return self.starts[-1].header if self.starts else {}

    @property
    def restarts(self) -> Sequence[RunStart]:
        """The starts that continued from a checkpoint."""
        return [start for start in self.starts if start.after]

    @property
    def evaluated(self) -> list[str]:
        """The names of the results of evaluations, losses first."""
        names = dict.fromkeys(name for row in self.evaluations for name in row if name != "step")
        return sorted(names, key=lambda name: not is_loss(name))

    def figure(self, name: str) -> list[float]:
        """Return the values of a figure over the steps that have it."""
        return [row[name] for row in self.steps if row.get(name) is not None]

    def summary(self) -> dict[str, Any]:
        """Return the run in a few numbers: loss and the like of the last step that has them, None
        if they are not finite; medians of rates, most bytes by tier.
        """
        figures: dict[str, Any] = {"run": self.name, "steps": self.steps[-1]["step"]}
        for name in ("loss", "learning_rate", "grad_norm", "loss_scale"):
            if having := [row for row in self.steps if name in row]:
                figures[name] = having[-1][name]
        for name in self.evaluated:
            figures[name] = next(r[name] for r in reversed(self.evaluations) if name in r)
        for name in ("step_ms", "samples_per_second", "tokens_per_second", "mfu", "wire_bytes"):
            if values := self.figure(name):
                figures[name] = median(values)
        for name in ("device_bytes", "peak_device_bytes", "ram_bytes", "disk_bytes"):
            if values := self.figure(name):
                figures[name] = max(values)
        return figures | {"restarts": len(self.restarts), "warnings": len(self.messages)}


def is_loss(name: str) -> bool:
    """Return whether the result of an evaluation with this name is a loss."""
    return name.lower().endswith("loss")


def read_run(folder: str | os.PathLike[str], trace: str | None = None) -> RecordedRun:
    """Return the run in ``folder``, with the trace in the file ``trace`` or else its own last one.

    Raises ConfigError if the folder has no figures, a row of them is damaged, or ``trace`` does not
    exist.
    """
    return RunReader(folder, trace).read()


class RunReader:
    """Reads the run in ``folder`` repeatedly while it runs; see :func:`read_run`."""

    def __init__(self, folder: str | os.PathLike[str], trace: str | None = None):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            missing = f"there is no folder {folder}"
            problem = f"{folder} is a file" if self.folder.exists() else missing
            raise ConfigError(f"{problem}; name the folder of a run")
        if trace is not None and not os.path.isfile(trace):
            raise ConfigError(f"there is no trace {trace}; engine.trace() writes one")
        self._trace = None if trace is None else Path(trace)
        self._metrics = MetricsReader(self.folder, self._refuse_damage)

    def _refuse_damage(self, row: Mapping[str, object]) -> None:
        if damage := problem_of(row):
            at = f"of step {row['step']}" if "step" in row else f"after step {row['after_step']}"
            file = self.folder / NAME
            raise ConfigError(f"{file}: a row {at} is damaged: {damage}; remove the line")

    def read(self) -> RecordedRun:
        """Return the run as its files are now."""
        rows = self._metrics.rows()
        traced = list(_traced(rows))
        steps = [_without_speeds(row, traced) for row in rows if "step" in row]
        if not steps:
            self._refuse_no_steps()
        return RecordedRun(
            self.folder.resolve().name,
            self.folder,
            steps,
            [
                RunStart(row["after_step"], row["repeated_steps"], row["run"])
                for row in rows
                if "run" in row
            ],
            list(_messages(rows)),
            next((row["totals"] for row in reversed(rows) if "totals" in row), {}),
            list(_evaluations(rows)),
            self._trace or _last_trace(self.folder, rows),
            traced,
            _planned_steps(rows),
            _rank_states(rows),
            _end(rows),
            self._metrics.updated,
        )

    def _refuse_no_steps(self) -> NoReturn:
        if files_of(self.folder):
            raise ConfigError(
                f"{self.folder / NAME} has no steps yet; call again when the run has taken one, or "
                "name the folder of another run"
            )
        raise ConfigError(
            f"{self.folder} has no metrics.jsonl, from which hf-zero reads a run: train with "
            '"metrics": {"enabled": true} in the configuration, or with `hf-zero launch --set '
            "metrics.enabled=true`; or name the folder that metrics.path names"
        )


def _traced(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last step of each trace."""
    for row in rows:
        match = TRACE_STEPS.fullmatch(Path(row["trace"]).name) if "trace" in row else None
        if match is not None:
            yield int(match[1]), int(match[2])


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the results of evaluations; those after one step that came in several rows, in one."""
    results: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "evaluation" in row:
            step = row["after_step"]
            results.setdefault(step, {"step": step}).update(row["evaluation"])
    yield from results.values()


def _planned_steps(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the steps of the whole run that its last start has recorded or has in the
    configuration of its scheduler.
    """
    for row in reversed(rows):
        if "planned_steps" in row:
            return int(row["planned_steps"])
        if "run" in row:
            values = {r["key"]: r["value"] for r in row["run"].get("config", ())}
            steps = values.get("scheduler.params", {})
            steps = steps.get("total_num_steps") if isinstance(steps, dict) else None
            return steps if type(steps) is int and steps > 0 else None
    return None


def _rank_states(rows: Sequence[Mapping[str, Any]]) -> RankStates | None:
    for row in reversed(rows):
        if "step" in row or "run" in row:  # all ranks have taken part
            return None
        if "ranks" in row:
            return RankStates(_utc(row["time"]), row["ranks"])
    return None


def _end(rows: Sequence[Mapping[str, object]]) -> str | None:
    for row in reversed(rows):
        if "step" in row or "run" in row:
            return None
        if "ended" in row:
            return str(row["ended"])
    return None


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds").removesuffix("+00:00")


def _without_speeds(row: Mapping[str, Any], traced: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
    if any(first <= row["step"] <= last for first, last in traced):
        return {**row, **{name: None for name in SPEEDS if name in row}}
    return row


def _messages(rows: Sequence[Mapping[str, Any]]) -> Iterator[LoggedMessage]:
    for row in rows:
        for level in LEVELS:
            if level in row:
                yield LoggedMessage(level, row[level], row["after_step"], _utc(row["time"]))


def _last_trace(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the last trace that exists: as the run noted it, or in its folder."""
    noted = [Path(row["trace"]) for row in rows if "trace" in row]
    beside = sorted(folder.glob(TRACES), key=lambda path: path.stat().st_mtime)
    moved = [folder / path.name for path in noted]
    candidates = (*reversed(noted), *reversed(moved), *reversed(beside))
    # os.path: a noted name may be longer than a file system allows
    return next((path for path in candidates if os.path.isfile(path)), None)
