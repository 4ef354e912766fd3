"""Monitors: figures of the training, written to files and services by rank 0.

An event is a name, a value and the number of samples read so far, (str, float, int).
"""

from __future__ import annotations

import csv
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hf_zero.config import ZeroConfig
from hf_zero.config.measures import CometSection, CsvSection, TensorBoardSection, WandbSection
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError
from hf_zero.logging import logger

if TYPE_CHECKING:
    from types import ModuleType

Event = tuple[str, float, int]
MonitorSection = TensorBoardSection | WandbSection | CometSection | CsvSection


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """The sections of all monitors."""

    tensorboard: TensorBoardSection = field(default_factory=TensorBoardSection)
    wandb: WandbSection = field(default_factory=WandbSection)
    comet: CometSection = field(default_factory=CometSection)
    csv_monitor: CsvSection = field(default_factory=CsvSection)

    @classmethod
    def from_config(cls, config: ZeroConfig) -> DeepSpeedMonitorConfig:
        """Return the sections of a whole configuration."""
        return cls(
            config.section_of(TensorBoardSection),
            config.section_of(WandbSection),
            config.section_of(CometSection),
            config.section_of(CsvSection),
        )

    @property
    def enabled(self) -> bool:
        """Return whether any monitor is enabled."""
        return any(getattr(self, each.name).enabled for each in fields(self))


def get_monitor_config(param_dict: Mapping[str, object]) -> DeepSpeedMonitorConfig:
    """Return the sections of a configuration dict. Raises ConfigError for invalid keys in them."""
    names = [each.name for each in fields(DeepSpeedMonitorConfig)]
    sections = {name: param_dict[name] for name in names if name in param_dict}
    return DeepSpeedMonitorConfig.from_config(ZeroConfig.from_dict(sections, foreign=True))


def _library(name: str, monitor: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the monitor {monitor} is enabled and its package is not installed ({error}); "
            f'pip install it, or write "{monitor}": {{"enabled": false}}'
        ) from error


class Monitor(ABC):
    """Write events on rank 0 if its section enables it; keys of the section are attributes."""

    def __init__(self, monitor_config: MonitorSection | DeepSpeedMonitorConfig) -> None:
        self.monitor_config = monitor_config
        self.writes = monitor_config.enabled and process_group.get_rank() == 0

    def __getattr__(self, name: str) -> Any:
        if name == "monitor_config":
            raise AttributeError(name)
        return getattr(self.monitor_config, name)

    @abstractmethod
    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """Write the events; do nothing if the monitor is off, or on another rank."""


class TensorBoardMonitor(Monitor):
    """``summary_writer``: torch's; None if nothing is written."""

    def __init__(self, tensorboard_config: TensorBoardSection) -> None:
        super().__init__(tensorboard_config)
        self.summary_writer: Any = None
        if self.writes:
            _library("tensorboard", "tensorboard")
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            self.summary_writer = writer(log_dir=os.path.join(self.output_path, self.job_name))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.writes:
            for event in event_list:
                self.summary_writer.add_scalar(*event)
            if flush:
                self.summary_writer.flush()


class CsvMonitor(Monitor):
    """Append rows of samples and value to a file for each name, such as Train_Samples_lr.csv."""

    def __init__(self, csv_config: CsvSection) -> None:
        super().__init__(csv_config)
        self.log_dir = os.path.join(self.output_path, self.job_name)
        self.write_events(())

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.writes:
            os.makedirs(self.log_dir, exist_ok=True)
        for name, value, samples in event_list if self.writes else ():
            file = name.replace("/", "_").replace(" ", "_")
            with open(os.path.join(self.log_dir, f"{file}.csv"), "a", newline="") as opened:
                rows = csv.writer(opened)
                if opened.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


class WandbMonitor(Monitor):
    """Write to a run of Weights & Biases."""

    def __init__(self, wandb_config: WandbSection) -> None:
        super().__init__(wandb_config)
        if self.writes:
            self._wandb = _library("wandb", "wandb")
            self._wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(
        self, data: dict[str, object], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Call wandb's ``log``."""
        if self.writes:
            self._wandb.log(data, step=step, commit=commit)

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        for name, value, samples in event_list:
            self.log({name: value}, step=samples)


class CometMonitor(Monitor):
    """``experiment``: Comet's; None if nothing is written."""

    def __init__(self, comet_config: CometSection) -> None:
        super().__init__(comet_config)
        self.experiment: Any = None
        self._written: dict[str, int] = {}
        if self.writes:
            names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
            settings = {name: getattr(comet_config, name) for name in names}
            self.experiment = _library("comet_ml", "comet").start(**settings)
            if comet_config.experiment_name is not None:
                self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """Write one value of each name in ``samples_log_interval`` samples; fewer samples than
        before are those of an earlier checkpoint, and begin anew.
        """
        for name, value, samples in event_list if self.writes else ():
            last = self._written.get(name)
            if last is None or samples < last or samples - last >= self.samples_log_interval:
                self._written[name] = samples
                self.experiment.log_metric(name, value, step=samples)


class MonitorMaster(Monitor):
    """All enabled monitors. What a file system refuses one of them is lost, and a warning says so
    once: a full disk under one rank must not end a training of all.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config)
        classes: dict[str, type[Monitor]] = {
            "tensorboard": TensorBoardMonitor,
            "wandb": WandbMonitor,
            "comet": CometMonitor,
            "csv_monitor": CsvMonitor,
        }
        sections = {name: getattr(monitor_config, name) for name in classes}
        self._monitors = {
            name: classes[name](section) for name, section in sections.items() if section.enabled
        }
        self._failed = set[str]()

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        events = list(event_list)
        for name, monitor in self._monitors.items():
            try:
                monitor.write_events(events, flush)
            except OSError as error:
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning("%s cannot write (%s); its events are lost", name, error)
