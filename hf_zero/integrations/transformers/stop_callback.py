"""Callback of a Trainer under ZeRO that saves a checkpoint when the job is asked to end.

[Note: SIGTERM]
The stock callback of ``TrainingArguments(enable_jit_checkpoint=True)`` checks a flag of its own
process at four points of a step: ranks would save at different points, or some not at all, and wait
for each other. If it saves before ``global_step`` is incremented, the engine has stepped already.
Under ZeRO the ranks agree on the end of one step.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from hf_zero.distributed import world_group
from hf_zero.integrations.checkpoint_folders import SENTINEL
from hf_zero.integrations.signal_saves import end, listen
from hf_zero.logging import JsonObject, log_rank0

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from hf_zero.integrations.engine_protocol import EngineProtocol

# key of `stateful_callbacks` in `trainer_state.json` for an evaluation that was left
LEFT = "EvaluationLeftByStopCallback"


def _states_of_callbacks(state: TrainerState) -> JsonObject:
    """Return the states of callbacks in ``state``, by name: the list that it declares becomes a
    dict when it is made.
    """
    states: JsonObject = state.stateful_callbacks  # type: ignore[assignment]
    return states


class StopCallback(TrainerCallback):
    """Save one checkpoint when all ranks have agreed to stop, then raise SystemExit. With
    ``enable_jit_checkpoint=True`` ``train()`` returns, as with the stock callback, and so it does
    if another callback stops training at that step.

    The Trainer itself saves, so that the checkpoint includes the losses of the step. An evaluation
    due at that step is left to the run that resumes: little time remains before the job is killed.
    """

    def __init__(self, trainer: Trainer, engine: EngineProtocol) -> None:
        self.trainer, self.engine = trainer, engine
        self._sentinel: Path | None = None
        self._only_model = False
        self._evaluates = False  # before the first step, what the resumed run has left
        self.returns = trainer.args.enable_jit_checkpoint  # train() does, after the save

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        listen(self.engine)
        self._evaluates = bool(_states_of_callbacks(state).pop(LEFT, None))
        if state.global_step >= state.max_steps:  # there is no further step
            self._evaluate()

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._evaluate()

    def _evaluate(self) -> None:
        """Run the evaluation that was left, as the Trainer does at the end of a step, with the
        random state that the step has left.
        """
        if not self._evaluates:
            return
        self._evaluates, trainer = False, self.trainer
        metrics = trainer._evaluate(None, None)
        best = trainer._determine_best_metric(metrics=metrics, trial=None)
        if best and (folder := self._folder(trainer.state)).is_dir():  # saved by the run that ended
            trainer.state.best_model_checkpoint = str(folder)

    def _folder(self, state: TrainerState) -> Path:
        """Return the folder of the checkpoint after this step."""
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        return Path(self.trainer._get_output_dir(trial=None), name)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if not self.engine.stop_requested:
            return
        ends_epoch = args.eval_strategy == "epoch" and state.epoch == int(state.epoch)
        if control.should_evaluate or (ends_epoch and args.eval_delay <= state.epoch):
            log_rank0(
                f"the evaluation due after step {state.global_step} is left to the run that "
                "resumes, as the job is asked to end",
                logging.WARNING,
            )
            _states_of_callbacks(state)[LEFT] = {"attributes": {"step": state.global_step}}
        control.should_save, control.should_evaluate = True, False
        # else nothing could be resumed
        self._only_model, args.save_only_model = args.save_only_model, False
        # what stops before the last step is another callback
        stops = control.should_training_stop and state.global_step < state.max_steps
        self.returns = control.should_training_stop = args.enable_jit_checkpoint or stops
        self._sentinel = self._folder(state) / SENTINEL
        log_rank0(f"asked to end: saving {self._sentinel.parent} and stopping")
        if state.is_world_process_zero:
            self._sentinel.parent.mkdir(parents=True, exist_ok=True)
            self._sentinel.write_text(
                f"Checkpoint started at step {state.global_step} and in progress...",
                encoding="utf-8",
            )

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self._sentinel is None:
            return
        world_group.barrier()  # every rank has written its files
        if state.is_world_process_zero:
            self._sentinel.unlink()
        self._sentinel, args.save_only_model = None, self._only_model
        if not self.returns:
            end(self.engine)
