"""Training phases: sequences, batches and the learning rate change at given steps within one run
and one series of checkpoints.

BERT trains on 128 tokens, then on 512 (Devlin et al., 2019); LAMB warms up again when they grow
(You et al., 2020). Growing batches, with the learning rate proportional to them or to their square
root: Smith et al., "Don't Decay the Learning Rate, Increase the Batch Size", 2018.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import MICRO, TOTAL
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.techniques import METRICS, PHASES, TrainingPhasesSection
from hf_zero.config.value_types import COUNT, integer, number
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.techniques import sequence_length
from hf_zero.techniques.data_sampling import sampled_metrics
from hf_zero.techniques.schedules import Stairs
from hf_zero.techniques.sequence_length import SequenceLength
from hf_zero.zero.feature import Feature, FeatureSet
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.step.window import Counters

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

_SCALING = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


@dataclass(frozen=True)
class Phase:
    """A phase of ``steps`` optimizer steps (None: until the end); None elsewhere: as configured
    globally.
    """

    steps: int | None = None
    sequence_length: int | None = None
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    lr_scale: float = 1.0
    warmup_steps: int = 0
    lr_decay_power: float = 0.0

    @classmethod
    def read(cls, values: Mapping[str, object], section: str) -> Phase:
        types = {item.name: integer(1) for item in fields(cls)} | {
            "lr_scale": number(above=0),
            "warmup_steps": COUNT,
            "lr_decay_power": number(0),
        }
        read = {}
        for name, value in values.items():
            if name not in types:
                raise ConfigError(f"unknown key '{section}.{name}'{did_you_mean(name, types)}")
            try:
                read[name] = None if value is None else types[name].convert(value)
            except ValueError:
                raise ConfigError(
                    f"{section}.{name} = {value!r} is not {types[name].expected}; write "
                    f"{types[name].expected}"
                ) from None
        phase = cls(**{name: value for name, value in read.items() if value is not None})
        if phase.lr_decay_power and phase.steps is None:
            raise ConfigError(
                f"{section}.lr_decay_power lets the learning rate end at 0 with the phase, which "
                f"has no end; write {section}.steps"
            )
        if phase.steps is not None and phase.warmup_steps > phase.steps:
            raise ConfigError(
                f"{section}.warmup_steps = {phase.warmup_steps} is more than steps = "
                f"{phase.steps}; the learning rate must have risen by the end of the phase"
            )
        return phase

    def lr_factor(self, step: int) -> float:
        """Return the learning-rate factor of step ``step`` of this phase, counted from 1: a linear
        warmup over ``warmup_steps`` steps, then (1 - t / T) ** lr_decay_power over the others.
        """
        if step <= self.warmup_steps:
            return self.lr_scale * step / self.warmup_steps
        if not self.lr_decay_power or self.steps is None:
            return self.lr_scale
        if step > self.steps:  # the last phase is over; it may have been warmup only
            return 0.0
        remaining = (self.steps - step + 1) / (self.steps - self.warmup_steps)
        return self.lr_scale * remaining**self.lr_decay_power


def rampup(start: int, increment: int, samples: int, end: int) -> Stairs[int]:
    """Return the samples of each step for a batch that grows from ``start`` to ``end``, by one
    increment after each equal share of ``samples``. As in Megatron, the batch of a step depends on
    the samples before it. Raises ConfigError if ``increment`` does not divide the difference.
    """
    grows, remainder = divmod(end - start, increment)
    if remainder or grows < 0:
        raise ConfigError(
            f"{PHASES}.rampup_batch_size goes from {start} by {increment} past {TOTAL} = {end}; "
            "write an increment that divides the difference"
        )
    samples_before, last, ends = 0, 0, []
    sizes = [start + grown * increment for grown in range(grows)]
    for grown, size in enumerate(sizes, 1):
        steps = max(0, math.ceil((samples * grown / grows - samples_before) / size))
        samples_before += steps * size
        last += steps
        ends.append(last)
    return Stairs([*sizes, end], ends)


class TrainingPhases(Feature):
    """The phases of one engine. All of it is a function of ``global_steps``."""

    def __init__(self, config: ZeroConfig):
        section = config.section_of(TrainingPhasesSection)
        self.phases = [
            Phase.read(phase, f"{PHASES}.phases[{at}]")
            for at, phase in enumerate(section.phases or [{}])
        ]
        for at, phase in enumerate(self.phases[:-1]):
            if phase.steps is None:
                raise ConfigError(
                    f"{PHASES}.phases[{at}] has no steps, and others follow; write its steps"
                )
        ends = list(accumulate(phase.steps or 0 for phase in self.phases[:-1]))
        self._schedule = Stairs(self.phases, ends)
        self._rampup = section.rampup_batch_size
        if self._rampup and any(phase.train_batch_size for phase in self.phases):
            raise ConfigError(
                f"{PHASES}.rampup_batch_size and {TOTAL} of a phase both say how many samples a "
                "step has; keep one"
            )
        self._batches: Stairs[int] | None = None  # samples of a step, while the batch grows
        self._power = _SCALING[section.lr_scaling_method]
        cuts = any(phase.sequence_length for phase in self.phases)
        self.sequences = (
            SequenceLength(self._length, PHASES, section.sequence_reshape) if cuts else None
        )
        self._counters = Counters()
        self._sizes = (1, 1)  # configured batch and micro-batch size
        self._set: tuple[int, int] | None = None  # micro-batch size and count, as last set here
        self._engine: weakref.ref[TrainingEngine] | None = None
        self._warned = False  # of a learning rate of 0

    @property
    def changes_micro_batches(self) -> bool:
        return any(phase.train_micro_batch_size_per_gpu for phase in self.phases)

    @property
    def changes_batches(self) -> bool:
        return bool(self._rampup) or any(phase.train_batch_size for phase in self.phases)

    def at(self, step: int) -> tuple[Phase, int]:
        """Return the phase of step ``step``, counted from 1, and the step's number within it."""
        number = self._schedule.number(step)
        before = self._schedule.ends[number - 1] if number else 0
        return self.phases[number], step - int(before)

    def batch_size(self, step: int) -> int:
        """Return the number of samples of optimizer step ``step`` over all ranks."""
        if self._batches is not None:
            return self._batches.at(step)
        return self._schedule.at(step).train_batch_size or self._sizes[0]

    def _micro_batch(self, phase: Phase) -> int:
        return phase.train_micro_batch_size_per_gpu or self._sizes[1]

    def lr_scale(self, step: int) -> float:
        """Return the factor of the schedule's learning rate in optimizer step ``step``."""
        phase, within = self.at(step)
        return phase.lr_factor(within) * (self.batch_size(step) / self._sizes[0]) ** self._power

    def resize(self, batch: int, micro: int) -> None:
        """Set the configured numbers of samples, of a step and of a micro-batch."""
        self._sizes = (batch, micro)
        if self._rampup:
            start, increment, samples = self._rampup
            self._batches = rampup(start, increment, samples, batch)

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError for batches that micro-batches do not divide, optimizers without a
        learning rate, and unmanaged accumulation windows.
        """
        if plan.optimizer is None or self._engine is not None:  # its sizes may be those of a phase
            return
        settings, ranks = plan.settings, plan.data_ranks
        batch = settings.train_batch_size or ranks
        self.resize(batch, settings.train_micro_batch_size_per_gpu or 1)
        ends = [*self._schedule.ends, *(self._batches.ends if self._batches is not None else ())]
        firsts = {1, *(int(end) + 1 for end in ends)}  # steps with which sizes may change
        sizes = {(self.batch_size(step), self._micro_batch(self.at(step)[0])) for step in firsts}
        for size, micro in sorted(sizes):
            if size % (micro * ranks):
                raise ConfigError(
                    f"{PHASES} makes steps of {size} samples, no multiple of the {micro * ranks} "
                    "that the micro-batches of all ranks have; choose one"
                )
        if self.phases[0].train_micro_batch_size_per_gpu not in (None, self._sizes[1]):
            raise ConfigError(
                f"{PHASES}.phases[0].{MICRO} is {self.phases[0].train_micro_batch_size_per_gpu}, "
                f"and {MICRO}, by which the loader is made, is {self._sizes[1]}; write that of the "
                "first phase there"
            )
        if any(group["lr"] is None for group in plan.optimizer.param_groups):
            raise ConfigError(
                f"{PHASES} changes the learning rate, but {type(plan.optimizer).__name__} "
                "computes its own; give it an lr"
            )
        if self.changes_batches and not settings.managed_gradient_accumulation:
            raise ConfigError(
                f"{PHASES} changes how many micro-batches a step has, and "
                "managed_gradient_accumulation is false; remove that key"
            )

    def apply(self, engine: TrainingEngine) -> None:
        if engine.optimizer is None:
            return
        self._engine, self._counters = weakref.ref(engine), engine.counters
        if self.sequences is not None:
            self.sequences.install(engine.module)
        self._begin(engine)

    def _begin(self, engine: TrainingEngine) -> None:
        """Prepare the engine for the next step: batch sizes and learning rate."""
        step = self._counters.global_steps + 1
        phase, _ = self.at(step)
        micro = self._micro_batch(phase)
        steps = self.batch_size(step) // (micro * engine.data_ranks)
        now = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
        if self.changes_batches or self.changes_micro_batches:
            if self._set not in (None, now):
                raise ConfigError(
                    f"the script has set {now[1]} micro-batches of {now[0]} samples for a step, "
                    f"and {PHASES} says how many each step has; leave set_train_batch_size() out, "
                    "or the batches of the phases"
                )
            self._set = micro, steps
            if now != self._set:
                engine.set_batches(micro, steps)
                _set_rows(engine.training_dataloader, micro)
        engine.optimizer_step.scale_rates(self.lr_scale(step))

    def _warn_of_zero_rate(self, engine: TrainingEngine) -> None:
        """Warn once if the last step had a learning rate of 0 and changed no weight."""
        if engine.optimizer_step.lr_scale or self._warned:
            return
        self._warned = True
        if engine.global_rank == 0:
            logger.warning(
                "%s.phases[%d] is over: its lr_decay_power leaves a learning rate of 0 from step "
                "%d on; end the training there, raise its steps, or add a phase",
                PHASES,
                len(self.phases) - 1,
                self._counters.global_steps,
            )

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        engine = self._engine() if self._engine is not None else None
        if engine is not None:
            self._warn_of_zero_rate(engine)
            self._begin(engine)

    def prepare_batch(self, batch: object) -> object:
        return batch if self.sequences is None else self.sequences.cut(batch)

    def load_state_dict(self, state: dict[str, object]) -> None:
        engine = self._engine() if self._engine is not None else None
        if engine is not None:
            self._begin(engine)

    def remove(self) -> None:
        if self.sequences is not None:
            self.sequences.remove()

    def _length(self) -> int | None:
        return self.at(self._counters.global_steps + 1)[0].sequence_length


def _set_rows(loader: object, rows: int) -> None:
    """Change the micro-batch size of the engine's own loader to ``rows`` from the next batch on.
    Raises ConfigError for a loader that drops incomplete batches.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if getattr(sampler, "batch_size", rows) == rows:
        return
    if sampler.drop_last:
        raise ConfigError(
            f"{PHASES} changes {MICRO}, and a loader that drops incomplete batches has fixed its "
            "own for the epoch; remove dataloader_drop_last"
        )
    sampler.batch_size = rows


def from_config(config: ZeroConfig) -> TrainingPhases | None:
    """Return the phases of ``config``, or None. Raises ConfigError for sequences that a curriculum
    truncates too, or of which ranks have parts, and for steps of several sizes beside samples
    chosen by difficulty.
    """
    section = config.section_of(TrainingPhasesSection)
    if section.phases is None and section.rampup_batch_size is None:
        return None
    phases = TrainingPhases(config)
    if phases.sequences is not None and sequence_length.from_config(config) is not None:
        raise ConfigError(
            f"a phase of {PHASES} and a curriculum both cut sequences to a length of their own; "
            "keep one"
        )
    if phases.sequences is not None and config.ranks_of_a_sequence > 1:
        raise ConfigError(
            f"a phase of {PHASES} shortens sequences, but under sequence_parallel_size or "
            "context_parallel_size each rank has only a part of each; leave one of them out"
        )
    if sampled_metrics(config) and (phases.changes_batches or phases.changes_micro_batches):
        raise ConfigError(
            f"{PHASES} changes how many samples a step has, and {METRICS} draws equally many for "
            "each step; leave one of them out"
        )
    return phases


def phases_of(engine: object) -> TrainingPhases | None:
    """Return the training phases of ``engine``; None without, or if it is no engine."""
    features = getattr(engine, "feature_set", None)
    return features.get(PHASES, TrainingPhases) if isinstance(features, FeatureSet) else None
