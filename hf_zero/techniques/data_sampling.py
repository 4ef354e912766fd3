"""Samples chosen by difficulty (arXiv 2212.03597): each step draws from the *pool* of samples that
every metric of the configuration admits at its current difficulty. Sections and names are
DeepSpeed's. The order of the samples is a function of the seed, the samples of a step and the
number of consumed samples:

- Initially each sample of the dataset is due once. A draw takes a sample that is in the pool and
  due, with equal probabilities, and it is due no longer. A draw that finds none starts another
  epoch: all are due again. So no sample is drawn twice in an epoch, however the pool changes
  meanwhile, and if the pool is the whole dataset the order is a shuffle per epoch.
- From a pool smaller than a batch, samples are drawn several times within the batch.

All ranks have the same order; the samplers of data loaders distribute it among them. A resumed run,
on any number of ranks with the same number of samples a step, replays only the sizes of its draws:
one permutation for each change of the pool, nothing for the samples in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from hf_zero.config import ZeroConfig
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.techniques import LENGTHS, METRICS, SAMPLING, DataEfficiency, DataSampling
from hf_zero.distributed.parallel_groups import dims_in_effect, readers
from hf_zero.errors import ConfigError
from hf_zero.techniques.difficulty_index import (
    AnalyzerIndex,
    DifficultyIndex,
    RankedSamples,
    is_analyzers,
)
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
    "index_to_metric_path", "index_to_sample_path", "difficulty_type", "clustering_type",
    "min_difficulty", "max_difficulty", "schedule_type", "schedule_config",
)  # fmt: skip

# (batch, state) -> batch; state: curriculum_step, counted from 1, and current_difficulties by
# metric
PostProcess = Callable[..., object]


@dataclass(frozen=True)
class Criterion:
    """The limit of one metric: samples up to ``difficulty(step)`` are admitted, steps counted from
    1. The difficulty is a value of the metric or, if ``percentiles`` is given, one of so many
    percentiles.
    """

    name: str
    index: RankedSamples
    difficulty: Callable[[int], float]
    percentiles: float | None = None
    # cache by difficulty: a search of the index in each step would cost more than the draws
    _counts: dict[float, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def admitted(self, step: int) -> int:
        """Return the number of the index's samples, easiest first, admitted at ``step``."""
        difficulty = self.difficulty(step)
        if difficulty not in self._counts:
            self._counts[difficulty] = (
                self.index.count_up_to(difficulty)
                if self.percentiles is None
                else self.index.count_of(difficulty, self.percentiles)
            )
        return self._counts[difficulty]

    def describe(self, step: int) -> str:
        difficulty = self.difficulty(step)
        if self.percentiles is None:
            return f"{self.name} ≤ {difficulty:g}"
        return f"percentile {difficulty:g} of {self.percentiles:g} of {self.name}"


class SampleOrder:
    """The order of ``rows`` samples under ``criteria``; a step takes ``batch_size`` samples over
    all ranks.
    """

    def __init__(self, rows: int, criteria: Sequence[Criterion], batch_size: int, seed: int):
        self.rows = rows
        self.criteria = tuple(criteria)
        self.batch_size = batch_size
        self.seed = seed

    def after(self, consumed: int) -> Iterator[int]:
        """Yield the samples from number ``consumed`` on, endlessly.

        Raises ConfigError at a step that admits no sample.
        """
        drawn, within = divmod(consumed, self.batch_size)
        draws, admitted, step = _Draws(self.rows, self.seed), None, 0
        while True:
            step += 1
            counts = [criterion.admitted(step) for criterion in self.criteria]
            if counts != admitted:
                admitted = counts
                draws.change_pool(self._pool(counts, step), step)
            if step <= drawn:
                draws.skip(self.batch_size)
            else:
                yield from draws.take(self.batch_size)[within:].tolist()
                within = 0

    def pool(self, step: int) -> np.ndarray:
        """Return the samples admitted at ``step``, counted from 1, in ascending order."""
        return self._pool([criterion.admitted(step) for criterion in self.criteria], step)

    def _pool(self, counts: list[int], step: int) -> np.ndarray:
        admitted = np.ones(self.rows, dtype=bool)
        for criterion, count in zip(self.criteria, counts):
            if count < self.rows:
                easy = np.zeros(self.rows, dtype=bool)
                easy[criterion.index.order[:count]] = True
                admitted &= easy
        pool = np.flatnonzero(admitted)
        if not len(pool):
            limits = " and ".join(criterion.describe(step) for criterion in self.criteria)
            raise ConfigError(
                f"no sample is admitted at step {step}, which asks for {limits}; raise "
                "min_difficulty (`hf-zero analyze` shows the values)"
            )
        return pool


class _Draws:
    """The draws as defined in the module docstring, from one pool at a time."""

    def __init__(self, rows: int, seed: int):
        self._seed = seed
        self._due = np.ones(rows, dtype=bool)
        self._pool = np.empty(0, dtype=np.int64)
        self._key = 0  # step at which the pool was set
        self._epochs = 0  # epochs started since
        # the pool's samples due in this epoch, shuffled on first use
        self._order: np.ndarray | None = None
        self._size = self._at = 0

    def change_pool(self, pool: np.ndarray, step: int) -> None:
        if self._at:
            self._due[self._shuffled()[: self._at]] = False
        self._pool, self._key, self._epochs, self._order = pool, step, 0, None
        self._size, self._at = int(self._due[pool].sum()), 0

    def skip(self, count: int) -> None:
        """Advance by ``count`` draws without returning the samples."""
        beyond = self._at + count - self._size
        if beyond <= 0:
            self._at += count
            return
        # an epoch ends only with the next draw after its last sample
        epochs, at = divmod(beyond - 1, len(self._pool))
        self._due[:] = True
        self._epochs += epochs + 1
        self._order, self._size, self._at = None, len(self._pool), at + 1

    def take(self, count: int) -> np.ndarray:
        taken = []
        while count:
            count_here = min(count, self._size - self._at) or min(count, len(self._pool))
            self.skip(count_here)
            taken.append(self._shuffled()[self._at - count_here : self._at])
            count -= count_here
        return np.concatenate(taken)

    def _shuffled(self) -> np.ndarray:
        if self._order is None:
            random = np.random.default_rng((self._seed, self._key, self._epochs))
            self._order = random.permutation(self._pool[self._due[self._pool]])
        return self._order


@dataclass
class _Training:
    """The training that a sampler and its copies follow."""

    order: SampleOrder | None = None
    steps_done: Callable[[], int] = int
    post_process: Callable[[object], object] | None = None


class CurriculumSampler(Sampler[int]):
    """Sampler of all ranks' samples in the order of the training: a step takes the next
    ``batch_size`` samples, whatever their division into micro-batches and ranks.

    The length, an epoch of the loader, is the number of samples in the dataset, in whole batches;
    the order decides which samples these are. An iteration starts with the first sample of the
    training's next step: a resumed run continues at its position, and the samples of an
    accumulation window without a step are drawn again.

    ``skip`` and ``announced``: as in :class:`hf_zero.setup.training_loader.EpochSampler`.
    """

    skip = 0
    announced: int | None = None
    follows_steps = True  # an iteration begins with the samples of the next step

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool = False):
        self.dataset = dataset
        self.batch_size = batch_size
        self._skipped = 0
        self._training = _Training()
        whole, remainder = divmod(len(dataset), batch_size)
        self._length = max(1, whole + bool(remainder and not drop_last)) * batch_size

    def follow(
        self,
        order: SampleOrder,
        steps_done: Callable[[], int],
        post_process: Callable[[object], object] | None = None,
    ) -> None:
        """Draw in ``order``, for a training that has completed ``steps_done()`` steps.
        ``post_process`` changes the batches of a
        :class:`hf_zero.setup.training_loader.TrainingLoader`.
        """
        training = self._training
        training.order, training.steps_done, training.post_process = order, steps_done, post_process

    def post_process(self, batch: object) -> object:
        """Return the batch that a loader yields for ``batch``, which may be post-processed."""
        return batch if self._training.post_process is None else self._training.post_process(batch)

    def __len__(self) -> int:
        return self._length

    @property
    def total_size(self) -> int:
        """The number of samples of an epoch, over all ranks."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        order = self._training.order
        if order is None:
            raise ConfigError(
                "a loader that draws by difficulty was iterated before there was an engine; "
                "prepare the model that it trains first"
            )
        consumed = self._training.steps_done() * self.batch_size - self._skipped
        skip, self.skip = self.skip, 0
        return islice(order.after(max(0, consumed)), max(0, self._length - skip))

    def set_epoch(self, epoch: int) -> None:
        """Announce the script's epoch; the step determines where an iteration starts."""
        self.announced = epoch

    def before_skipping(self, samples: int) -> CurriculumSampler:
        """Return a copy for a loader that drops its first ``samples`` samples, which a resumed
        training has consumed: the first sample after them belongs to the training's next step.
        """
        other = copy.copy(self)
        other._skipped += samples
        return other


class RankBatches(Sampler[list[int]]):
    """Yield one rank's share of the micro-batches: every ``ranks``-th, from number ``rank``."""

    def __init__(self, sampler: CurriculumSampler, micro_batch: int, ranks: int, rank: int):
        self.batches = BatchSampler(sampler, micro_batch, drop_last=True)
        self.batch_size, self.ranks, self.rank = micro_batch, ranks, rank

    def __len__(self) -> int:
        return len(self.batches) // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, self.rank, None, self.ranks)


class RankSamples(Sampler[int]):
    """Yield the samples of ``batches`` one by one, for loaders that build micro-batches of that
    size themselves.
    """

    def __init__(self, batches: RankBatches):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches) * self.batches.batch_size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.batches)


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
