"""Wrappers of the life of a Trainer under ZeRO: its construction and Accelerator, its ``train()``
with the engine of each, evaluation before training.

Every wrapper is inert for a Trainer without ZeRO, and if ``import deepspeed`` is a library other
than hf-zero. Imported while ``import transformers`` runs: everything of Transformers is imported
inside the functions.

[Note: evaluation before training]
For an evaluation before training the stock Trainer prepares an engine without an optimizer: stages
0 to 2 raise, and stage 3 deletes the optimizer from the live config, fills the schedule for zero
steps and cannot train afterwards. No preparation is needed: until the engine is made the model is
an ordinary one, and afterwards its hooks serve the raw model too. So the evaluation loop runs as if
ZeRO were off, and training finds everything unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.memory_saves import leave_to_trainer
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.save_redirection import save_folder
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_optimizers import keep_given_optimizer
from hf_zero.integrations.transformers.trainer_refusals import (
    refuse_arguments,
    refuse_rebalanced_batches,
    refuse_scheduler_alone,
    refuse_shared_completions,
    refuse_trial,
)
from hf_zero.integrations.transformers.trainer_resume import prepare_resume, release_marks
from hf_zero.integrations.transformers.trainer_route import (
    CALLBACK,
    engine_environment,
    engine_of,
    environment,
    find_callback,
    output_folder,
    route,
    under_zero,
    verify,
    verify_state,
)
from hf_zero.integrations.transformers.trainer_signals import (
    save_on_signals,
    stop_saving_on_signals,
)
from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


ResumeChoice = Callable[["TrainingArguments", "str | bool | None"], "str | bool | None"]
_resume_choice: ResumeChoice | None = None


def choose_resume(choice: ResumeChoice | None) -> None:
    """Have ``choice(args, resume_from_checkpoint)`` return what a ``train()`` under ZeRO resumes
    from, in this process; it may change when ``args`` save. None: the script decides.
    """
    global _resume_choice
    _resume_choice = choice


def find_zero_callback(original: Original, self: Trainer, *args: object, **kwargs: object) -> None:
    """Wraps ``Trainer.__init__``: a ZeroCallback among the callbacks routes this Trainer. Raises
    ConfigError for a scheduler without its optimizer, and for batches that ranks cannot share.
    """
    callback = find_callback(original, self, args, kwargs)
    if callback is not None:
        setattr(self, CALLBACK, callback)
        vars(callback)["trainer"] = weakref.ref(self)  # whose batches it counts
    original(self, *args, **kwargs)
    refuse_scheduler_alone(self)
    refuse_rebalanced_batches(self)
    if callback is not None:
        # First, before the reporters, so that its additions to the logs reach them.
        callbacks = self.callback_handler.callbacks
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def route_accelerator(original: Original, self: Trainer) -> None:
    """Wraps ``Trainer.create_accelerator_and_postprocess``: makes the Accelerator with ZeRO if
    requested, and checks that it is on. Raises ConfigError for arguments that cannot train so.
    """
    with environment(), route(self) as expected:
        if expected and finder.chosen():
            refuse_arguments(self.args)
        original(self)
    if expected or under_zero(self):
        verify(self)
        self.args.output_dir = save_folder(output_folder(self.args))
        refuse_shared_completions(self)


def train_anew(
    original: Original,
    self: Trainer,
    resume_from_checkpoint: str | bool | None = None,
    trial: object = None,
    ignore_keys_for_eval: object = None,
) -> object:
    """Wraps ``Trainer.train``: a second ``train()`` continues with the model of the first, unless
    ``model_init`` makes another, and resuming uses the last complete checkpoint. Signals that save
    are handled until it ends. Raises ConfigError for a trial whose arguments have no configuration.
    """
    if finder.chosen():
        verify_state(self)
    if under_zero(self):
        refuse_trial(self, trial)
        goes_on = resume_from_checkpoint in (None, False) and self.model_init is None
        if _leave_engine(self) and goes_on:
            log_rank0(
                "another train() goes on with the weights and with a new optimizer, as the "
                "Trainer has it under ZeRO"
            )
        if _resume_choice is not None:
            resume_from_checkpoint = _resume_choice(self.args, resume_from_checkpoint)
        resume_from_checkpoint = prepare_resume(self, resume_from_checkpoint)
    try:
        return original(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
    finally:
        if under_zero(self):
            stop_saving_on_signals(self)


def _leave_engine(trainer: Trainer) -> bool:
    """Destroy the engine of an earlier ``train()``, so that ``trainer`` has the plain model again;
    return whether there was one.
    """
    engine: object = trainer.deepspeed
    if not is_engine(engine):
        return False
    if not engine.destroyed:  # by accelerator.free_memory(), or for a smaller batch
        engine.destroy_and_restore()
    # between the trials of a search there is no model
    trainer.model_wrapped, trainer.deepspeed = trainer.model, None  # type: ignore[assignment]
    return True


def prepare_engine(
    original: Original,
    self: Trainer,
    max_steps: int,
    train_dataloader: object,
    resume_from_checkpoint: object,
) -> object:
    """Wraps ``Trainer._prepare_for_training``: gives the new engine the run's folder and number of
    steps, and the callback that saves on a signal. Raises ConfigError if the trained model is
    wrapped in anything but the engine.
    """
    if not under_zero(self):
        return original(self, max_steps, train_dataloader, resume_from_checkpoint)
    keep_given_optimizer(self)
    with environment(**engine_environment(self.args)):
        result = original(self, max_steps, train_dataloader, resume_from_checkpoint)
    release_marks(self)
    engine: object = self.deepspeed
    if not is_engine(engine):
        raise ConfigError(
            f"ZeRO is on, but the Trainer prepared {type(engine).__name__} instead of "
            "hf-zero's engine and would train unsharded; "
            "pass the plain model to Trainer, without DataParallel or another wrapper around it"
        )
    from hf_zero.integrations.peft.adapters import keep_what_is_written

    keep_what_is_written(engine)
    engine.measures.keep_in(str(output_folder(self.args)))
    engine.generations.note_run(output_folder(self.args))
    engine.measures.plan_steps(max_steps)
    engine.measures.shown_elsewhere()
    self._mixed_mesh_grads = False  # a gradient that the engine holds is not read to find out
    leave_to_trainer(self.accelerator)
    self.accelerator.deepspeed_engine_wrapped.follow_trainer()
    if engine.config.checkpoint.save_on_signal or self.args.enable_jit_checkpoint:
        save_on_signals(self, engine)
    return result


def evaluate_raw(original: Original, self: Trainer, *args: object, **kwargs: object) -> object:
    """Wraps ``Trainer.evaluation_loop``: evaluates and predicts before training, at every stage."""
    if not under_zero(self):
        return original(self, *args, **kwargs)
    verify_state(self)
    with _answering_zero3(self):
        if engine_of(self) is not None:
            return original(self, *args, **kwargs)
        with replaced(self, is_deepspeed_enabled=False):  # the raw model, as without ZeRO
            return original(self, *args, **kwargs)


@contextmanager
def _answering_zero3(trainer: Trainer) -> Iterator[None]:
    """Make ``is_deepspeed_zero3_enabled()`` answer for this Trainer: ``generate`` uses it to decide
    whether ranks must stay in step.
    """
    from transformers.integrations import deepspeed as theirs

    before = theirs._hf_deepspeed_config_weak_ref
    theirs.set_hf_deepspeed_config(trainer.accelerator.state.deepspeed_plugin.hf_ds_config)
    try:
        yield
    finally:
        theirs._hf_deepspeed_config_weak_ref = before
