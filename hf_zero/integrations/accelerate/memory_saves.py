"""Loops of Accelerate that save into the memory of the hosts with what ``save_state`` saves, once
the body of the loop has ended. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint.memory import checkpoints_of, newest
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations.engine_protocol import EngineProtocol, is_engine, trains
from hf_zero.integrations.memory_checkpoints import save_if_due
from hf_zero.integrations.seams import Original, replaced

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderAdapter
    from accelerate.state import GradientState

    from hf_zero.zero.training_engine import TrainingEngine

INTO_MEMORY = "_hf_zero_into_memory"  # an attribute of an accelerator during such a save
_saving: weakref.WeakSet[Accelerator] = weakref.WeakSet()  # accelerators whose loops save so


def engines_of(accelerator: Accelerator) -> list[EngineProtocol]:
    """Return the engines that ``accelerator`` has prepared and that still exist, in order."""
    engines = [model for model in accelerator._models if is_engine(model)]
    return [engine for engine in engines if not engine.destroyed]


def save_by_loop(accelerator: Accelerator) -> None:
    """Have the loop of a script save the engine of ``accelerator`` into the memory of the hosts,
    with what ``save_state`` saves, if its configuration says so. Raises ConfigError for several.
    """
    engines = [engine for engine in engines_of(accelerator) if trains(engine)]
    if all(checkpoints_of(engine) is None for engine in engines):
        return
    if len(engines) > 1:
        raise ConfigError(
            f"checkpoint.memory saves at a step of one model, and {len(engines)} models are "
            "prepared for training; take the key out and save all of them with save_state()"
        )
    engine = engines[0]
    checkpoints = checkpoints_of(engine)
    assert checkpoints is not None
    checkpoints.leave_saves_to_trainer()
    checkpoints.note_run(accelerator.project_dir)
    engine.register_forward_pre_hook(_before_forward)
    _saving.add(accelerator)


def leave_to_trainer(accelerator: Accelerator) -> None:
    """Have the Trainer save what :func:`save_by_loop` has the loop of a script save."""
    _saving.discard(accelerator)


def save_between_batches(original: Original, self: DataLoaderAdapter) -> None:
    """Wraps two calls of Accelerate's loaders after the body of a script's loop: saves into the
    memory of the hosts if it is due. Loaders in the body, of an evaluation, do not.
    """
    if _saving and _loops(self.gradient_state)[:1] in ([], [self]):
        _save_what_is_due()
    original(self)


def _before_forward(engine: TrainingEngine, inputs: object) -> None:
    """Save before the next forward, if no prepared loader has brought its batch."""
    from accelerate.state import GradientState

    if _saving and engine.training and not _loops(GradientState()):
        _save_what_is_due()


def _loops(state: GradientState) -> list[object]:
    """Return the loaders that are being iterated over, the outermost first."""
    return [loader for loader in state.dataloader_references if loader is not None]


def _save_what_is_due() -> None:
    for accelerator in list(_saving):
        for engine in engines_of(accelerator):
            save_if_due(engine, functools.partial(_write_state, accelerator))


def _write_state(accelerator: Accelerator, folder: Path) -> Path:
    from accelerate.utils import ProjectConfiguration

    plain = ProjectConfiguration(save_on_each_node=True)
    with replaced(accelerator, project_configuration=plain, **{INTO_MEMORY: True}):
        accelerator.save_state(str(folder))
    return folder


def newer_in_memory(accelerator: Accelerator, folder: str | None) -> str | None:
    """Return the folder of the newest state in memory, unless ``folder`` is newer. Collective."""
    checkpoints = [
        newest(engine, folder, run=accelerator.project_dir)
        for engine in engines_of(accelerator)
        if isinstance(engine, Engine) and checkpoints_of(engine) is not None and trains(engine)
    ]
    return str(checkpoints[0].directory) if checkpoints and checkpoints[0] is not None else folder
