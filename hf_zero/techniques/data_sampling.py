"""Data efficiency by sampling (arXiv 2212.03597): each step draws from the samples that the
difficulty metrics admit. Sections and names are DeepSpeed's; the order of the draws is defined in
:mod:`hf_zero.techniques.sample_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.config.curriculum import LENGTHS, METRICS
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError
from hf_zero.techniques.analyzer_index import AnalyzerIndex, is_analyzers
from hf_zero.techniques.curriculum import metrics_of
from hf_zero.techniques.curriculum_sampler import CurriculumSampler
from hf_zero.techniques.difficulty import DifficultySchedule, Number
from hf_zero.techniques.difficulty_index import DifficultyIndex, RankedSamples
from hf_zero.techniques.sample_order import Criterion, SampleOrder
from hf_zero.zero.backward import Counters

_DIFFICULTY = ("value", "percentile")
SINGLE = "single_cluster"
_CLUSTERING = ("schedule_based", SINGLE)
_KEYS = (
    "index_to_metric_path",
    "index_to_sample_path",
    "difficulty_type",
    "clustering_type",
    "min_difficulty",
    "max_difficulty",
    "schedule_type",
    "schedule_config",
)


# (batch, state) -> batch; state: curriculum_step, counted from 1, and current_difficulties by
# metric
Finish = Callable[[Any, dict[str, Any]], Any]


class DifficultySampling:
    """Gives samplers their order and tells them which step comes next; a
    :class:`hf_zero.techniques.registry.Technique`.
    """

    def __init__(self, metrics: Mapping[str, Mapping[str, Any]], seed: int):
        self.schedules: dict[str, DifficultySchedule] = {}
        self._criteria: list[Criterion] = []
        self._difficulties: dict[str, Callable[[int], Number]] = {}
        self._single: list[str] = []  # metrics that admit every sample
        self._seed = seed
        self._counters = Counters()
        self._followed = False
        self._finish: Finish | None = None
        self._finished = False  # whether a batch was post-processed since the last step
        for name, settings in metrics.items():
            section = f"{METRICS}.{name}"
            _check(settings, section)
            schedule = self.schedules[name] = DifficultySchedule(settings, section)
            difficulty = self._difficulties[name] = _by_step(schedule)
            if settings.get("clustering_type") == SINGLE:
                self._single.append(name)
                continue
            by_value = settings.get("difficulty_type", "value") == "value"
            top = None if by_value else schedule.max_difficulty
            index = _opened(settings, section, by_value)
            self._criteria.append(Criterion(name, index, difficulty, top))

    def follow(self, sampler: CurriculumSampler) -> None:
        """Make ``sampler`` draw in the order of this engine's training. Raises DifficultyIndexError
        if its dataset is not the analyzed one.
        """
        for criterion in self._criteria:
            criterion.index.check(sampler.dataset)
        rows = len(sampler.dataset)
        order = SampleOrder(rows, self._criteria, sampler.batch_size, self._seed)
        sampler.follow(order, lambda: self._counters.global_steps, self.finish)
        self._followed = True

    def finish_by(self, function: Finish) -> None:
        """Post-process the batches of the engine's own loaders with ``function`` from now on."""
        self._finish = function

    def finish(self, batch: Any) -> Any:
        """Return the batch that a loader yields for ``batch``, which belongs to the next step."""
        if self._finish is None:
            return batch
        self._finished = True
        done = self._counters.global_steps
        difficulties = {name: each(done + 1) for name, each in self._difficulties.items()}
        return self._finish(
            batch, {"curriculum_step": done + 1, "current_difficulties": difficulties}
        )

    def install(self, engine: Any) -> None:
        self._counters = engine.counters

    def end_step(self) -> None:
        if not self._followed:
            raise ConfigError(
                f"{METRICS} names {', '.join(self.schedules)}, and no loader draws by "
                "difficulty: pass training_data= to initialize, or prepare a DataLoader over a "
                "map-style dataset with shuffle=True (the Trainer's default sampling) with the "
                "model's Accelerator"
            )
        if self._single and self._finish is None:
            raise ConfigError(
                f"{METRICS}.{self._single[0]}.clustering_type is {SINGLE!r}, which admits every "
                "sample at every step, and nothing takes its difficulty; call "
                "engine.set_data_post_process_func(function), or write schedule_based "
                f"({' or '.join(LENGTHS)} for a metric that cuts sequences)"
            )
        if self._finish is not None and not self._finished:
            raise ConfigError(
                "set_data_post_process_func was given a function, and no batch of this step has "
                "gone through it: pass training_data= to initialize and train on its loader, or "
                "change the data in a collate_fn"
            )
        self._finished = False

    def state_dict(self) -> dict[str, Any]:
        return {}  # the step, the seed and the schedules determine everything

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def remove(self) -> None: ...


def _check(settings: Mapping[str, Any], section: str) -> None:
    for key in settings:
        if key not in _KEYS:
            raise ConfigError(f"{section} has no key {key!r}{did_you_mean(key, _KEYS)}")
    for key, known in (("difficulty_type", _DIFFICULTY), ("clustering_type", _CLUSTERING)):
        value = settings.get(key, known[0])
        if value not in known:
            raise ConfigError(
                f"{section}.{key} = {value!r} is none of {', '.join(known)}"
                f"{did_you_mean(str(value), known)}"
            )


def _opened(settings: Mapping[str, Any], section: str, by_value: bool) -> RankedSamples:
    """Open the index named in ``settings``: one of ``hf-zero analyze``, or of DeepSpeed's
    analyzer.
    """
    metric, samples = settings.get("index_to_metric_path"), settings.get("index_to_sample_path")
    if samples and is_analyzers(samples) and (metric or not by_value):
        return AnalyzerIndex(samples, metric if by_value else None)
    if not metric:
        raise ConfigError(
            f"{section} has no index_to_metric_path; `hf-zero analyze DATASET` writes an index and "
            "says which to name"
        )
    if is_analyzers(metric):
        raise ConfigError(
            f"{section}.index_to_metric_path is an index of DeepSpeed's data analyzer, which has "
            "the samples beside it; write index_to_sample_path"
        )
    if samples not in (None, metric):
        raise ConfigError(
            f"{section}.index_to_sample_path = {samples!r} is another folder than "
            "index_to_metric_path, and an index of `hf-zero analyze` holds both; leave it out"
        )
    return DifficultyIndex(metric)


def _by_step(schedule: DifficultySchedule) -> Callable[[int], Number]:
    """Return the difficulty as a function of the step, callable in any order of steps: a custom
    function is called once for each step, in ascending order.
    """
    if schedule.schedule_type != "custom":
        return schedule.at
    known: list[Number] = []

    def difficulty(step: int) -> Number:
        known.extend(schedule.at(number) for number in range(len(known) + 1, step + 1))
        return known[step - 1]

    return difficulty


def sampled_metrics(config: ZeroConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of the metrics by which ``config`` selects samples."""
    return {name: held for name, held in metrics_of(config).items() if name not in LENGTHS}


def of_config(config: ZeroConfig) -> DifficultySampling | None:
    metrics = sampled_metrics(config)
    return DifficultySampling(metrics, config.data_efficiency.seed) if metrics else None
