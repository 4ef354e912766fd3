"""The training techniques that a configuration asks for, on the model of one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from hf_zero.config import ZeroConfig
from hf_zero.config.curriculum import LEGACY
from hf_zero.config.training_phases import PHASES
from hf_zero.errors import ConfigError
from hf_zero.techniques import curriculum, training_phases
from hf_zero.techniques.quantization import quantize_training, weight_quantization


class Technique(Protocol):
    """One technique, made from a configuration; :class:`hf_zero.core.guards.Techniques` says when
    its methods are called.
    """

    def install(self, engine: Any) -> None: ...

    def end_step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def remove(self) -> None: ...


@runtime_checkable
class PreparesBatches(Protocol):
    """A technique that changes what the model is called with."""

    def prepare_batch(self, batch: Any) -> Any: ...


# By the key of its section, in the order of installing: makes the technique, or None where the
# configuration does not ask for it.
TECHNIQUES: Mapping[str, Callable[[ZeroConfig], Technique | None]] = {
    LEGACY: curriculum.of_config,
    "quantize_training": quantize_training,
    "weight_quantization": weight_quantization,
    PHASES: training_phases.of_config,
}


class TrainingTechniques:
    """What ``config`` asks for; a :class:`hf_zero.core.guards.Techniques`."""

    def __init__(self, config: ZeroConfig):
        made = {key: make(config) for key, make in TECHNIQUES.items()}
        self.by_key = {key: each for key, each in made.items() if each is not None}

    def install(self, engine: Any) -> None:
        for technique in self.by_key.values():
            technique.install(engine)

    def end_step(self) -> None:
        for technique in self.by_key.values():
            technique.end_step()

    def prepare_batch(self, batch: Any) -> Any:
        for technique in self.by_key.values():
            if isinstance(technique, PreparesBatches):
                batch = technique.prepare_batch(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        states = {key: technique.state_dict() for key, technique in self.by_key.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, technique in self.by_key.items():
            technique.load_state_dict(state.get(key, {}))

    def remove(self) -> None:
        for technique in reversed(self.by_key.values()):
            technique.remove()


def set_custom_schedule(
    techniques: Any, schedule: Callable[[int], float] | Mapping[str, Callable[[int], float]]
) -> None:
    """Give ``schedule`` to the curriculum of an engine. Raises ConfigError where there is none."""
    technique = techniques.by_key.get(LEGACY)
    if technique is None:
        raise ConfigError(
            "a function was given as the schedule of curriculum learning, which is off; write "
            f"{LEGACY}: {{enabled: true, schedule_type: custom, …}}, or leave the call out"
        )
    technique.set_schedule(schedule)
