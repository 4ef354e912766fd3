"""The logs of a Trainer under ZeRO: figures of the engine for reporters, its own lines in the
terminal, a norm that is read when it is logged. Imported while ``import transformers`` runs.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from torch import nn

from hf_zero.integrations.seams import Original
from hf_zero.integrations.transformers.trainer_route import engine_of, under_zero

if TYPE_CHECKING:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )


def leave_norm_on_device(
    original: Original, self: Trainer, model: nn.Module, grad_norm: object = None
) -> object:
    """Wraps ``Trainer._get_grad_norm``: returns a tensor, which the Trainer reads when it logs."""
    if not under_zero(self):
        return original(self, model, grad_norm)
    if grad_norm is None:
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    return grad_norm


class TrainingLogs(dict[str, float]):
    """Logs of the Trainer with figures of the engine. ``figures``: names of those that the terminal
    leaves out.
    """

    figures: Set[str] = frozenset()


def add_figures(
    original: Original, self: Trainer, logs: dict[str, float], start_time: float | None = None
) -> None:
    """Wraps ``Trainer.log``: the logs of training have the engine's figures, too, so that every
    reporter gets them. A name that the Trainer has itself keeps the Trainer's value. The results of
    an evaluation join the engine's figures.
    """
    if (engine := engine_of(self)) is not None:
        engine.measures.note_evaluation(engine, logs)
    if under_zero(self) and "loss" in logs:
        from hf_zero.measures.figures import tracked

        figures = tracked({} if engine is None else engine.figures)
        script_logs, logs = logs, TrainingLogs({**figures, **logs})
        logs.figures = figures.keys() - script_logs.keys()
    original(self, logs, start_time)


def print_without_figures(
    original: Original,
    self: TrainerCallback,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    logs: dict[str, float] | None = None,
    **kwargs: object,
) -> None:
    """Wraps ``on_log`` of the callbacks that print to the terminal: the line is the Trainer's."""
    if isinstance(logs, TrainingLogs):
        logs = {name: value for name, value in logs.items() if name not in logs.figures}
    original(self, args, state, control, logs=logs, **kwargs)
