"""``TrainingArguments(enable_jit_checkpoint=True)``: a Trainer that receives SIGTERM saves and
ends, on all ranks together.

The stock callback checks a flag of its own process at four points of a step: ranks would save at
different points, or some not at all, and wait for each other. If it saves before ``global_step`` is
incremented, the engine has stepped already. Under ZeRO the ranks agree on the end of one step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from hf_zero.distributed import world_group
from hf_zero.integrations.checkpoint_folders import SENTINEL
from hf_zero.integrations.transformers.trainer_route import under_zero
from hf_zero.logging import log_rank0


def agree_to_stop(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wraps ``JITCheckpointCallback.set_trainer``: the callback of a ZeRO Trainer gets the events
    of :class:`AgreedStop`.
    """

    def set_trainer(self: Any, trainer: Any) -> None:
        if not (under_zero(trainer) and trainer.args.enable_jit_checkpoint):
            original(self, trainer)
            return
        self.trainer = trainer  # without a manager: the stock events then do nothing
        agreed = AgreedStop(trainer)
        self.on_train_begin, self.on_train_end = agreed.on_train_begin, agreed.on_train_end
        self.on_step_end, self.on_save = agreed.on_step_end, agreed.on_save

    return set_trainer


class AgreedStop:
    """Events of a callback that saves one checkpoint when the job is asked to end, and stops
    training.

    The Trainer itself saves, so that the checkpoint includes the losses of the step. An evaluation
    due at that step is skipped: little time is left before the job is killed.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._sentinel = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.deepspeed.stop_on(signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.deepspeed.stop_requested:
            return
        control.should_save = control.should_training_stop = True
        control.should_evaluate = False
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

        folder = os.path.join(
            self.trainer._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        )
        log_rank0(f"asked to end: saving {folder} and stopping")
        self._sentinel = os.path.join(folder, SENTINEL)
        if state.is_world_process_zero:
            os.makedirs(folder, exist_ok=True)
            with open(self._sentinel, "w", encoding="utf-8") as file:
                file.write(f"Checkpoint started at step {state.global_step} and in progress...")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._sentinel:
            world_group.barrier()  # every rank has written its files
            if state.is_world_process_zero:
                os.remove(self._sentinel)
            self._sentinel = ""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.deepspeed.stop_on()
