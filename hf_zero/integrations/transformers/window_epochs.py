"""Callback of a Trainer whose accumulation windows grow: the epoch that other callbacks, logs and
checkpoints read, counted by batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState


class WindowEpochs(TrainerCallback):
    """Set ``state.epoch`` after each step, for which the Trainer counts a window as one batch.

    ``length``: batches of an epoch. ``epoch``, ``used``: as training begins, the number of ended
    epochs, and of batches used in the current one.
    """

    def __init__(self, trainer: Trainer, length: int, epoch: int, used: int) -> None:
        self.trainer, self.length = trainer, length
        self.epoch, self.used = epoch, used

    def on_step_end(
        self, args: object, state: TrainerState, control: object, **kwargs: object
    ) -> None:
        self.used += self.trainer.current_gradient_accumulation_steps
        state.epoch = self.epoch + self.used / self.length

    def on_epoch_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.epoch, self.used = self.epoch + 1, 0
