"""The training techniques of a configuration, installed on the model of one engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import CURRICULUM_LEARNING, METRICS, PHASES, SAMPLING, TOKEN_DROP
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.tiled_mlp import KEY as TILED_MLP
from hf_zero.parallel.sequence.tiled_mlp import TiledMlps
from hf_zero.techniques import data_sampling, sequence_length, training_phases
from hf_zero.techniques.data_sampling import CurriculumSampler
from hf_zero.techniques.layer_drop import KEY as LAYER_DROP
from hf_zero.techniques.layer_drop import LayerDrop
from hf_zero.techniques.quantization import from_quantize_training, from_weight_quantization
from hf_zero.techniques.schedules import DifficultySchedule
from hf_zero.techniques.token_drop import TokenDrop
from hf_zero.zero.extensions import Technique
from hf_zero.zero.layout.engine_plan import EnginePlan

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


# Factories by the key of their section, in the order of installation; None if the configuration
# does not enable the technique.
TECHNIQUES: Mapping[str, Callable[[ZeroConfig], Technique | None]] = {
    CURRICULUM_LEARNING: sequence_length.from_config,
    SAMPLING: data_sampling.from_config,
    PHASES: training_phases.from_config,
    # after the curricula: eigenvalues are measured on truncated batches
    "quantize_training": from_quantize_training,
    "weight_quantization": from_weight_quantization,
    LAYER_DROP: LayerDrop.from_config,
    TOKEN_DROP: TokenDrop.from_config,
    TILED_MLP: TiledMlps.from_config,
}


def _refuse_lengths(techniques: Mapping[str, Technique | None]) -> None:
    """Raise ConfigError for techniques that would take a part of a sequence for the whole."""
    phases = techniques[PHASES]
    lengths = isinstance(phases, training_phases.TrainingPhases) and any(
        phase.sequence_length for phase in phases.phases
    )
    for key in (CURRICULUM_LEARNING, TOKEN_DROP, *((PHASES,) if lengths else ())):
        if techniques[key] is not None:
            raise ConfigError(
                f"{key} shortens sequences, but under sequence_parallel_size or "
                "context_parallel_size each rank has only a part of each; leave one of them out"
            )


class TrainingTechniques(Technique):
    """The techniques that ``config`` asks for."""

    def __init__(self, config: ZeroConfig, others: Mapping[str, Technique] | None = None):
        """``others``: further techniques for the model, by key."""
        techniques = {key: make(config) for key, make in TECHNIQUES.items()}
        self.by_key = {key: t for key, t in techniques.items() if t is not None}
        self.by_key |= others or {}
        phases = techniques[PHASES]
        if config.ranks_of_a_sequence > 1:
            _refuse_lengths(techniques)
        if (
            SAMPLING in self.by_key
            and isinstance(phases, training_phases.TrainingPhases)
            and (phases.changes_batches or phases.changes_micro_batches)
        ):
            raise ConfigError(
                f"{PHASES} changes how many samples a step has, and {METRICS} draws equally many "
                "for each step; leave one of them out"
            )

    def with_others(self, others: Mapping[str, Technique]) -> TrainingTechniques:
        """Return these techniques with further ones for the model, by key."""
        copied = copy.copy(self)
        copied.by_key = {**self.by_key, **others}
        return copied

    def check(self, plan: EnginePlan) -> None:
        for technique in self.by_key.values():
            technique.check(plan)

    def install(self, engine: TrainingEngine) -> None:
        for technique in self.by_key.values():
            technique.install(engine)

    def end_step(self) -> None:
        for technique in self.by_key.values():
            technique.end_step()

    def prepare_batch(self, batch: object) -> object:
        for technique in self.by_key.values():
            batch = technique.prepare_batch(batch)
        return batch

    def state_dict(self) -> dict[str, object]:
        states = {key: technique.state_dict() for key, technique in self.by_key.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, technique in self.by_key.items():
            technique.load_state_dict(state.get(key, {}))

    def remove(self) -> None:
        for technique in reversed(self.by_key.values()):
            technique.remove()


def phases_of(engine: object) -> training_phases.TrainingPhases | None:
    """Return the training phases of ``engine``; None without, or if it is no engine."""
    techniques = getattr(engine, "techniques", None)
    if not isinstance(techniques, TrainingTechniques):
        return None
    phases = techniques.by_key.get(PHASES)
    return phases if isinstance(phases, training_phases.TrainingPhases) else None


def check_samples(techniques: TrainingTechniques, data: object) -> None:
    """Raise DifficultyIndexError if ``data`` is a dataset whose samples are chosen by difficulty,
    and another one was analyzed.
    """
    sampling = techniques.by_key.get(SAMPLING)
    if isinstance(sampling, data_sampling.DifficultySampling) and hasattr(data, "__getitem__"):
        sampling.check_dataset(data)


def follow(techniques: Any, sampler: Any) -> None:
    """Make a ``sampler`` by difficulty follow the training of an engine; ignore any other."""
    sampling = techniques.by_key.get(SAMPLING)
    if isinstance(sampler, CurriculumSampler) and sampling is not None:
        sampling.follow(sampler)


def set_custom_schedule(
    techniques: Any, s: Callable[[int], float] | Mapping[str, Callable[[int], float]]
) -> None:
    """Set the functions of custom schedules, by name, or one function for the only curriculum.
    Raises ConfigError if curriculum learning is off, or if a name is unknown or missing.
    """
    schedules: dict[str, DifficultySchedule] = {}
    for technique in techniques.by_key.values():
        schedules |= getattr(technique, "schedules", {})
    if not schedules:
        raise ConfigError(
            "a function was given as the schedule of curriculum learning, which is off; write "
            f"{CURRICULUM_LEARNING}: {{enabled: true, schedule_type: custom, …}}, or leave the "
            "call out"
        )
    if not isinstance(s, Mapping):
        custom = [name for name, s in schedules.items() if s.schedule_type == "custom"]
        s = dict.fromkeys(custom or schedules, s)
        if len(s) > 1:
            raise ConfigError(
                f"one function was given as the schedule of {' and '.join(s)}; pass "
                "functions by these names"
            )
    for name, function in s.items():
        if name not in schedules:
            raise ConfigError(
                f"a function was given as the schedule of {name}, but only "
                f"{' and '.join(schedules)} is scheduled; name that, or pass just the function"
            )
        schedules[name].set_function(function)


def set_post_process(techniques: Any, function: data_sampling.PostProcess) -> None:
    """Post-process the batches of an engine's own loaders with ``function``. Raises ConfigError
    unless samples are selected by difficulty.
    """
    sampling = techniques.by_key.get(SAMPLING)
    if sampling is None:
        raise ConfigError(
            "set_data_post_process_func takes the batches that data_efficiency.data_sampling "
            f"chooses, which is off; write {METRICS}, or change the data in a collate_fn"
        )
    sampling.set_post_process(function)
