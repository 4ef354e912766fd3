"""The measures of one engine, as its configuration asks for them; its steps call them."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint.storage import local_path
from hf_zero.config import ZeroConfig
from hf_zero.config.measures import (
    CommsLoggerSection,
    FlopsProfilerSection,
    MetricsSection,
    TraceSection,
)
from hf_zero.device import spans
from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, logger
from hf_zero.measures.collectives import EngineCollectives
from hf_zero.measures.comms_log import comms_logger, engine_lines
from hf_zero.measures.figures import Figures, StepFigures, StepLine, evaluation_results, tracked
from hf_zero.measures.flops_profiler import StepProfile
from hf_zero.measures.memory import breakdown, layout
from hf_zero.measures.metrics_file import MetricsFile
from hf_zero.measures.monitors import DeepSpeedMonitorConfig, Event, MonitorMaster
from hf_zero.measures.run_record import WarningRecords, note_end, run_header
from hf_zero.measures.stopwatch import StepTimes
from hf_zero.measures.trace import StepTrace
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.step.step_interfaces import StepMeasures

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

PREFIX = "Train/Samples/"
# DeepSpeed's names of figures, beside ours
FORMER = {
    "loss": "train_loss",
    "learning_rate": "lr",
    "forward_ms": "elapsed_time_ms_forward",
    "backward_ms": "elapsed_time_ms_backward",
    "update_ms": "elapsed_time_ms_step",
}
_files = weakref.WeakSet[MetricsFile]()  # of engines that have not ended
PARTS = {"fwd": "forward_ms", "bwd": "backward_ms", "step": "update_ms"}


class StepMeasuring(Feature):
    """Measures of the steps of one engine."""

    def __init__(self, settings: ZeroConfig):
        self._plan: EnginePlan | None = None
        self._engine: weakref.ref[TrainingEngine] | None = None

    def check(self, plan: EnginePlan) -> None:
        self._plan = plan

    def apply(self, engine: TrainingEngine) -> None:
        assert self._plan is not None
        self._engine, plan, self._plan = weakref.ref(engine), self._plan, None
        engine.measures = measures_of(engine, plan)

    def remove(self) -> None:
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            measures, engine.measures = engine.measures, StepMeasures()
            measures.close(engine)
        self._engine = None


class MeasuresOnDemand(StepMeasures["TrainingEngine"]):
    """Measures nothing until a script asks for a trace."""

    def trace(self, engine: TrainingEngine, steps: int, folder: str) -> None:
        engine.measures = measures = EngineMeasures(engine)
        measures.trace(engine, steps, folder)


def measures_of(engine: TrainingEngine, plan: EnginePlan) -> StepMeasures[TrainingEngine]:
    """Return what measures the steps of ``engine``, made by ``plan``, as its configuration says:
    nothing for steps without memory, those of a simulation. Collective if it asks for measures.
    """
    if engine.device.type == "meta":
        return StepMeasures()
    config = engine.config
    line = StepLine(config, engine.global_rank)
    needed = (
        config.wall_clock_breakdown,
        config.memory_breakdown,
        config.dump_state,
        config.section_of(MetricsSection).enabled,
        config.section_of(TraceSection).enabled,
        config.section_of(CommsLoggerSection).enabled,
        config.section_of(FlopsProfilerSection).enabled,
        line.every or line.by_time,
        DeepSpeedMonitorConfig.from_config(config).enabled,
    )
    return EngineMeasures(engine, plan) if any(needed) else MeasuresOnDemand()


class EngineMeasures(StepMeasures["TrainingEngine"]):
    """Measures of the steps of ``engine``; it holds no reference to it. ``plan``: the engine's, for
    the header of its file; None if it writes none. Collective if the configuration asks for
    measures; without that rank 0 alone may have them, for its line.

    ``monitor``: the enabled monitors. ``counts``: its collectives, None if nothing asks for them.
    """

    def __init__(self, engine: TrainingEngine, plan: EnginePlan | None = None):
        with ExitStack() as opened:
            self._open(engine, plan, opened)
            self._opened = opened.pop_all()

    def _open(self, engine: TrainingEngine, plan: EnginePlan | None, opened: ExitStack) -> None:
        """Open what the configuration asks for. ``opened`` collects the inverse operations, which
        refer to none of these measures: they end with an engine that nobody destroys.
        """
        config, device, rank = engine.config, engine.device, engine.global_rank
        metrics, comms = config.section_of(MetricsSection), config.section_of(CommsLoggerSection)
        flops, trace = config.section_of(FlopsProfilerSection), config.section_of(TraceSection)
        self._rank, self._line = rank, StepLine(config, rank)
        self._every, self._world = self._line.every, engine.mesh.pp_stage_ranks
        self.times = StepTimes(config.wall_clock_breakdown, self._every or 1, device, rank)
        monitors = DeepSpeedMonitorConfig.from_config(config)
        with raise_on_all_ranks("open its monitors") if monitors.enabled else spans.NOTHING:
            self.monitor = MonitorMaster(monitors)
        self._memory = config.memory_breakdown
        self._logs_collectives = comms.enabled
        self.file: MetricsFile | None = None
        self._resumed: str | None = None  # the folder of the run that a load continues
        self._has_warned = False  # of a folder in an object store
        self._shows = metrics.enabled
        self._warnings: WarningRecords | None = None
        header = run_header(engine, plan) if metrics.enabled and plan is not None else None
        # an engine without an optimizer, such as TRL's reference model, takes no steps
        steps = plan is None or plan.optimizer is not None
        if metrics.enabled and rank == 0 and steps:
            self._open_file(engine, header, opened)
        folder = metrics.path or config.checkpoint.folder
        if folder is not None:
            self.keep_in(folder)
        self.counts_samples = metrics.enabled or self.monitor.enabled or comms.enabled
        self._open_figures(engine, metrics, opened)
        if self.counts is not None and comms.enabled:
            comms_logger.take(comms)
            comms_logger.engines.add(self.counts)
        self.profile: StepProfile | None = None
        if flops.enabled:
            self.profile = StepProfile(engine, flops)
        self._trace: StepTrace | None = None
        self._due = trace if trace.enabled else None
        if config.dump_state and rank == 0:
            logger.info("state of the engine:\n%s", layout(engine))
        self._trace_when_due(engine)

    def _open_figures(
        self, engine: TrainingEngine, metrics: MetricsSection, opened: ExitStack
    ) -> None:
        """Count collectives and collect figures, of all ranks or, for its line, of rank 0 alone."""
        self.counts: EngineCollectives | None = None
        if self.counts_samples:
            dims = [*engine.mesh.mesh_dims, *engine.mesh.parallel_mesh_dims]
            self.counts = EngineCollectives(dims, engine.device)
            opened.callback(self.counts.close)
        self._figures: StepFigures | None = None
        self._alone = not (self.counts_samples or self._every)
        if self._alone and not self._line.by_time:
            return
        counts_samples, line = self.counts_samples, self._line

        def is_wanted(number: int) -> bool:
            return counts_samples or line.is_due(number)

        self._figures = StepFigures(
            engine, metrics, self.counts, is_wanted, self._report, self._alone
        )

    def _open_file(
        self, engine: TrainingEngine, header: JsonObject | None, opened: ExitStack
    ) -> None:
        self.file = MetricsFile(engine.config.section_of(MetricsSection).rotate_bytes, header)
        self._warnings = WarningRecords(self.file)
        opened.callback(self._warnings.close)
        # at destroy(), when nothing refers to the engine any more, or as the process ends
        self._end = weakref.finalize(self, note_end, self.file, os.getpid())
        engine.mesh.watchdog.records.add(self.file)
        opened.callback(engine.mesh.watchdog.records.discard, self.file)
        opened.callback(_files.discard, self.file)

    def forward(
        self, engine: TrainingEngine, args: object, kwargs: object
    ) -> AbstractContextManager[object]:
        if self._figures is not None and self._figures.collects:
            self._figures.forward(engine, engine.batch_of(args, kwargs))
        timed = self.times.timed("fwd")
        return timed if self.profile is None else _nested(timed, self.profile.forward())

    def backward(
        self, engine: TrainingEngine, loss: torch.Tensor, weighed: bool
    ) -> AbstractContextManager[object]:
        if self._figures is not None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._figures.backward(loss, weighed)
        return self.times.timed("bwd")

    def begin_update(self, engine: TrainingEngine) -> None:
        if self._figures is not None:
            self._figures.begin_step(engine)

    @contextmanager
    def step(self, engine: TrainingEngine) -> Iterator[None]:
        ends_window = engine.accumulation.ends_by_step
        if self._figures is not None and ends_window and engine.changes.unconfirmed is None:
            self._figures.begin_step(engine)
        before = engine.accumulation.updates
        with self.times.timed("step"):
            yield
        number = engine.counters.global_steps
        ends_window = engine.accumulation.updates > before
        if self.times.on:
            self.times.end(ends_window, number)
        if not ends_window:
            return
        if self._figures is not None:
            self._figures.end_step(engine)
        if self.profile is not None:
            self.profile.step_has_ended()
        if self._trace is not None and self._trace.end_step(engine):
            written, self._trace = self._trace.path, None
            if self._figures is not None:
                self._figures.pause()  # the time it took to write
            if self.file is not None and written.is_file():
                self.file.note("trace", str(written.resolve()))
        if self._due is not None:
            self._trace_when_due(engine)
        if self._rank == 0 and number % (self._every or 1) == 0:
            if self._memory:
                logger.info("step %d: memory | %s", number, breakdown(engine))
            if self._every and self._logs_collectives:
                self._log_collectives()

    def divided_by(self, steps: int | None) -> None:
        if self._figures is not None:
            self._figures.divided_by(steps)

    def zero_grad(self) -> None:
        if self._figures is not None:
            self._figures.zero_grad()

    def trace(self, engine: TrainingEngine, steps: int, folder: str) -> None:
        if self._trace is None:
            self._trace = StepTrace(engine, steps, folder)

    def _trace_when_due(self, engine: TrainingEngine) -> None:
        due = self._due
        if due is not None and engine.global_steps + 1 == due.first:
            self._due = None
            self.trace(engine, due.steps, due.path)

    def shown_elsewhere(self) -> None:
        self._line.by_time = False

    @property
    def figures(self) -> Mapping[str, object]:
        return self._figures.last if self._figures is not None and self._shows else {}

    @property
    def folder(self) -> Path | None:
        if self.file is None:
            return None
        return self.file.folder or (None if self._resumed is None else Path(self._resumed))

    def keep_in(self, folder: str) -> None:
        if self._shows:
            with raise_on_all_ranks("make the folder of its metrics"):
                self._keep_in(folder)

    def _keep_in(self, folder: str) -> None:
        if self.file is None or self.file.folder is not None:
            return
        try:
            path = local_path(folder, "the folder of metrics")
        except CheckpointError as error:  # lines are appended, which object stores do not
            self._resumed = None
            if not self._has_warned:
                self._has_warned = True
                logger.warning("metrics: no file has the figures: %s; or write metrics.path", error)
            return
        free_folder = _free_folder(path)
        self.file.keep_in(free_folder)
        _files.add(self.file)
        if free_folder != path:
            logger.warning(
                "metrics: another engine of this process writes to %s, so this one writes to %s; "
                "give each a metrics.path, or destroy() an engine that has ended",
                folder,
                free_folder,
            )

    def plan_steps(self, steps: int) -> None:
        if self.file is not None:
            self.file.note("planned_steps", steps)

    def note_evaluation(self, engine: TrainingEngine, values: Mapping[str, object]) -> None:
        if self.file is not None and (results := evaluation_results(values)):
            self.finish(engine)  # the steps before it come first
            self.file.note("evaluation", results)

    def saving(self, engine: TrainingEngine, folder: str) -> None:
        self.finish(engine)
        if self._figures is not None:
            self._figures.pause()
        self.keep_in(self._resumed or folder)
        if self.file is not None:
            self._note_totals()
            self.file.sync()

    def loaded(self, engine: TrainingEngine, continues: bool, folder: str | None) -> None:
        self.times.restart()
        if self._figures is not None:
            self._figures.restart(engine)
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        self._trace_when_due(engine)
        if self.file is not None and continues:
            # the Trainer names its output_dir behind the load of a checkpoint in it
            self._resumed = folder
            self.file.resume_after(engine.global_steps)

    def _note_totals(self) -> None:
        """Append what has been counted since the engine was made, and the bytes of its state."""
        assert self.file is not None and self.counts is not None and self._figures is not None
        state = [
            {"kind": kind, "tier": tier, "bytes": size}
            for (kind, tier), size in self._figures.held.items()
            if size
        ]
        self.file.note("totals", {"collectives": self.counts.totals(), "state": state})

    def finish(self, engine: TrainingEngine) -> None:
        if self.times.on:
            self.times.finish()
        if self._figures is not None:
            self._figures.finish(engine)

    def close(self, engine: TrainingEngine) -> None:
        with self._opened as ending:
            if self._trace is not None:
                ending.callback(self._trace.close)
            self.finish(engine)
            if self._logs_collectives and self._rank == 0:
                self._log_collectives()
            if self.file is not None and self._warnings is not None:
                ending.callback(self._warnings.close)  # before that of a trace, which warns
                self._note_totals()
                self._end()
                if self.file.lost_steps:
                    logger.warning(
                        "metrics: the figures of %d steps are in no file: %s; write metrics.path",
                        self.file.lost_steps,
                        f"{self.file.folder} could not be written"
                        if self.file.folder
                        else "no local folder was named",
                    )
            self.profile = None

    def _report(self, figures: Figures) -> None:
        number = figures["step"]
        while self.times.windows and self.times.windows[0][0] <= number:
            at, window = self.times.windows.popleft()
            if at == number:
                figures.update({PARTS[part]: ms for part, ms in window.items()})
        if self._rank:
            return
        if self.file is not None:
            if self._resumed is not None:
                self._keep_in(self._resumed)
            self.file.write(figures)
        if self.monitor.enabled:
            self.monitor.write_events(_events(figures))
        self._line.log(figures, self._alone and self._world > 1)

    def _log_collectives(self) -> None:
        assert self.counts is not None
        names = None if comms_logger.prof_all else comms_logger.prof_ops
        lines = engine_lines(self.counts, names)
        logger.info("collectives of rank 0:\n  %s", "\n  ".join(lines))


@contextmanager
def _nested(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


def _free_folder(folder: Path) -> Path:
    """Return ``folder``, or a folder in it while another engine of this process writes to it."""
    names = (f"model_{number}" for number in itertools.count(1))
    choices = itertools.chain([folder], (folder / name for name in names))
    taken = _taken()
    if folder.resolve() in taken:
        gc.collect()  # engines that nobody destroys
        taken = _taken()
    return next(choice for choice in choices if choice.resolve() not in taken)


def _taken() -> set[Path]:
    return {file.folder.resolve() for file in _files if file.folder is not None}


def _events(figures: Figures) -> list[Event]:
    """Return the figures of a step as events of monitors, under our names and DeepSpeed's."""
    drawn = tracked(figures)
    for ours, theirs in FORMER.items():
        if ours in drawn:
            drawn[theirs] = drawn[ours]
    return [(PREFIX + name, value, figures["samples_seen"]) for name, value in drawn.items()]
