"""Samples chosen by difficulty (arXiv 2212.03597) as a feature of an engine: each step draws from
the samples that every metric of the configuration admits at its current difficulty. Sections and
names are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from hf_zero.config import ZeroConfig
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.techniques import LENGTHS, METRICS, SAMPLING, DataEfficiency, DataSampling
from hf_zero.distributed.parallel_groups import dims_in_effect, readers
from hf_zero.errors import ConfigError
from hf_zero.techniques.curriculum_samplers import CurriculumSampler, RankBatches
from hf_zero.techniques.difficulty_index import (
    AnalyzerIndex,
    DifficultyIndex,
    RankedSamples,
    is_analyzers,
)
from hf_zero.techniques.sample_order import Criterion, SampleOrder
from hf_zero.techniques.schedules import DifficultySchedule, Number
from hf_zero.techniques.sequence_length import metrics_of
from hf_zero.zero.engine_parts import EngineFeatures
from hf_zero.zero.feature import EngineInputs, Feature
from hf_zero.zero.step.window import Counters

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

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
PostProcess = Callable[..., object]


class DifficultySampling(Feature):
    """Gives samplers their order and tells them which step comes next. The step, the seed and the
    schedules determine everything.
    """

    def __init__(self, metrics: Mapping[str, Mapping[str, object]], seed: int):
        self.schedules: dict[str, DifficultySchedule] = {}
        self._criteria: list[Criterion] = []
        self._difficulties: dict[str, Callable[[int], Number]] = {}
        self._single: list[str] = []  # metrics that admit every sample
        self._seed = seed
        self._counters = Counters()
        self._followed = False
        self._post_process: PostProcess | None = None
        self._post_processed = False  # a batch, since the last step
        self.shares_sequences = False  # ranks do, and draw batches of several steps at once
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

    def check_inputs(self, inputs: EngineInputs) -> None:
        """Raise DifficultyIndexError if the data is a dataset, and another one was analyzed."""
        if hasattr(inputs.data, "__getitem__"):
            self.check_dataset(inputs.data)

    def follow_loader(self, loader: object) -> object:
        sampler = getattr(loader, "data_sampler", None)
        if isinstance(sampler, CurriculumSampler):
            self.follow(sampler)
        return loader

    def check_dataset(self, dataset: object) -> None:
        """Raise DifficultyIndexError if ``dataset`` is not the analyzed one."""
        for criterion in self._criteria:
            criterion.index.check(dataset)

    def follow(self, sampler: CurriculumSampler) -> None:
        """Make ``sampler`` draw in this training's order. Raises as :meth:`check_dataset`."""
        self.check_dataset(sampler.dataset)
        rows = len(sampler.dataset)
        order = SampleOrder(rows, self._criteria, sampler.batch_size, self._seed)
        sampler.follow(order, lambda: self._counters.global_steps, self.post_process)
        self._followed = True

    def set_post_process(self, function: PostProcess) -> None:
        """Post-process the batches of the engine's own loaders with ``function`` from now on."""
        self._post_process = function

    def post_process(self, batch: object) -> object:
        """Return the batch that a loader yields for ``batch``, which belongs to the next step."""
        if self._post_process is None:
            return batch
        self._post_processed = True
        step = self._counters.global_steps
        difficulties = {name: at(step + 1) for name, at in self._difficulties.items()}
        return self._post_process(
            batch, {"curriculum_step": step + 1, "current_difficulties": difficulties}
        )

    def apply(self, engine: TrainingEngine) -> None:
        self._counters = engine.counters
        dims = engine.mesh.dims
        self.shares_sequences = dims.size("sequence") * dims.size("context") > 1

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        if not self._followed:
            raise ConfigError(
                f"{METRICS} names {', '.join(self.schedules)}, and no loader draws by "
                "difficulty: pass training_data= to initialize, or prepare a DataLoader over a "
                "map-style dataset with shuffle=True (the Trainer's default sampling) with the "
                "model's Accelerator"
            )
        if self._single and self._post_process is None:
            raise ConfigError(
                f"{METRICS}.{self._single[0]}.clustering_type is {SINGLE!r}, which admits every "
                "sample at every step, and nothing takes its difficulty; call "
                "engine.set_data_post_process_func(function), or write schedule_based "
                f"({' or '.join(LENGTHS)} for a metric that truncates sequences)"
            )
        if self._post_process is not None and not self._post_processed:
            raise ConfigError(
                "set_data_post_process_func was given a function, and no batch of this step has "
                "gone through it: pass training_data= to initialize and train on its loader, or "
                "change the data in a collate_fn"
            )
        self._post_processed = False


def _check(settings: Mapping[str, object], section: str) -> None:
    for key in settings:
        if key not in _KEYS:
            raise ConfigError(f"{section} has no key {key!r}{did_you_mean(key, _KEYS)}")
    for key, values in (("difficulty_type", _DIFFICULTY), ("clustering_type", _CLUSTERING)):
        value = settings.get(key, values[0])
        if value not in values:
            raise ConfigError(
                f"{section}.{key} = {value!r} is none of {', '.join(values)}"
                f"{did_you_mean(str(value), values)}"
            )


def _opened(settings: Mapping[str, Any], section: str, by_value: bool) -> RankedSamples:
    """Open the index named in ``settings``, of ``hf-zero analyze`` or DeepSpeed's analyzer."""
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
    sizes: list[Number] = []

    def difficulty(step: int) -> Number:
        sizes.extend(schedule.at(number) for number in range(len(sizes) + 1, step + 1))
        return sizes[step - 1]

    return difficulty


def sampled_metrics(config: ZeroConfig) -> dict[str, dict[str, object]]:
    """Return the settings of the metrics by which ``config`` selects samples."""
    return {name: settings for name, settings in metrics_of(config).items() if name not in LENGTHS}


def from_config(config: ZeroConfig) -> DifficultySampling | None:
    metrics = sampled_metrics(config)
    return DifficultySampling(metrics, config.section_of(DataEfficiency).seed) if metrics else None


def follow(features: EngineFeatures[Any], sampler: object) -> None:
    """Make a ``sampler`` by difficulty follow the training of an engine; ignore any other."""
    sampling = features.get(SAMPLING, DifficultySampling)
    if isinstance(sampler, CurriculumSampler) and sampling is not None:
        sampling.follow(sampler)


def set_post_process(features: EngineFeatures[Any], function: PostProcess) -> None:
    """Post-process the batches of an engine's own loaders with ``function``. Raises ConfigError
    unless samples are selected by difficulty.
    """
    sampling = features.get(SAMPLING, DifficultySampling)
    if sampling is None:
        raise ConfigError(
            "set_data_post_process_func takes the batches that data_efficiency.data_sampling "
            f"chooses, which is off; write {METRICS}, or change the data in a collate_fn"
        )
    if sampling.shares_sequences:
        raise ConfigError(
            "set_data_post_process_func takes the batch of a step, and ranks that share sequences "
            "draw those of several steps at once; change the data in a collate_fn, or train "
            "without sequence parallelism"
        )
    sampling.set_post_process(function)


def loader_options(data: Any, config: ZeroConfig) -> Mapping[str, Any] | None:
    """Return the options of the loader of ``data`` whose samples are chosen by difficulty; None if
    ``config`` chooses none. Raises ConfigError for data that is iterated.
    """
    if not sampled_metrics(config):
        return None
    if isinstance(data, IterableDataset):
        raise ConfigError(
            f"training_data is a {type(data).__name__}, which is iterated, and {METRICS} "
            "chooses samples by their numbers; pass a map-style Dataset"
        )
    micro, (ranks, rank) = config.train_micro_batch_size_per_gpu or 1, readers()
    # the ranks of a sequence yield their batches in turn, which are those of successive steps
    sequence = max(config.ranks_of_a_sequence, dims_in_effect().sequence_context)
    turn, group = rank % sequence, rank // sequence
    drop_last = bool(config.dataloader_drop_last)
    sampler = CurriculumSampler(data, config.train_batch_size or micro * ranks, drop_last)
    return {
        "data_sampler": sampler,
        "batch_sampler": RankBatches(sampler, micro, ranks, turn * (ranks // sequence) + group),
        "num_workers": config.section_of(DataSampling).num_workers,
        "pin_memory": config.section_of(DataSampling).pin_memory,
    }
