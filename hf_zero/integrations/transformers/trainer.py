"""Wrappers of ``transformers.trainer``: routing, the guard against unsharded training, evaluation
before training, 8-bit optimizers without bitsandbytes, the run in the model card.

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

import logging
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.engine_steps import StepCaller
from hf_zero.integrations.accelerate.loaders import sequence_ranks, tensor_ranks
from hf_zero.integrations.accelerate.memory_saves import leave_to_trainer
from hf_zero.integrations.checkpoint_folders import save_folder
from hf_zero.integrations.engine_protocol import EngineProtocol, is_engine
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_phases import batches_of
from hf_zero.integrations.transformers.trainer_resume import prepare_resume, release_marks
from hf_zero.integrations.transformers.trainer_route import (
    CALLBACK,
    SAVE_WEIGHTS,
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
from hf_zero.logging import log_rank0, logger
from hf_zero.optim import AdamW8bit, Lion8bit

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

    from hf_zero.engine import Engine

GIVEN = "_hf_zero_given"
REBALANCED = "batch_rebalance"  # a value of train_sampling_strategy
_announced: weakref.WeakSet[EngineProtocol] = (
    weakref.WeakSet()
)  # engines whose checkpoints were described


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
    if callback is None:
        original(self, *args, **kwargs)
        _refuse_scheduler_alone(self)
        _refuse_rebalanced_batches(self)
        return
    setattr(self, CALLBACK, callback)
    vars(callback)["trainer"] = weakref.ref(self)  # whose batches it counts
    original(self, *args, **kwargs)
    _refuse_scheduler_alone(self)
    _refuse_rebalanced_batches(self)
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
            _refuse_arguments(self.args)
        original(self)
    if expected or under_zero(self):
        verify(self)
        self.args.output_dir = save_folder(output_folder(self.args))
        _refuse_shared_completions(self)


def _refuse_arguments(args: TrainingArguments) -> None:
    """Raise ConfigError for the arguments that Transformers refuses under DeepSpeed."""
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end=True reads a checkpoint in shards, and with "
            "save_only_model=True there is none; leave save_only_model out (save_total_limit=1 "
            "keeps the best checkpoint and the last), or leave load_best_model_at_end out, write "
            "metric_for_best_model, and load trainer.state.best_model_checkpoint by from_pretrained"
        )
    plugin = args.deepspeed_plugin  # None if an Accelerator of the script has it
    if args.auto_find_batch_size and plugin is not None and plugin.zero_stage == 3:
        raise ConfigError(
            "auto_find_batch_size=True makes the engine again for each batch size, which the "
            "Trainer does at stages 0 to 2 alone; write zero_optimization.stage = 2, or leave it "
            "out and write a per_device_train_batch_size that fits"
        )


def _refuse_scheduler_alone(trainer: Trainer) -> None:
    """Raise ConfigError for a scheduler whose optimizer is not given: another one would train."""
    if under_zero(trainer) and trainer.optimizer is None and trainer.lr_scheduler is not None:
        name = type(trainer.lr_scheduler).__name__
        raise ConfigError(
            f"Trainer(optimizers=(None, {name})) gives a scheduler without its optimizer, and it "
            "would not set the rates of the one that the Trainer makes; pass both, "
            f"optimizers=(optimizer, {name}), or choose a schedule by lr_scheduler_type"
        )


def _refuse_shared_completions(trainer: Trainer) -> None:
    """Raise ConfigError under tensor parallelism for a trainer that compares several completions of
    a prompt, which TRL distributes among all ranks.
    """
    size = tensor_ranks(trainer.accelerator.state)
    if size > 1 and hasattr(trainer.args, "num_generations"):
        raise ConfigError(
            f"{type(trainer).__name__} compares the completions of a prompt that all ranks have "
            f"sampled, and by {TENSOR_SIZE} = {size} ranks {', '.join(map(str, range(size)))} "
            "sample the same ones, which it would count as different; leave the key out, and "
            "write zero_optimization.stage = 3 for a model that one rank has no room for"
        )


def _refuse_rebalanced_batches(trainer: Trainer) -> None:
    """Raise ConfigError for a sampler of the Trainer that gives each rank batches of its own, where
    the configuration has ranks that share them. It samples only a dataset with a length.
    """
    from transformers.trainer_utils import has_length

    if not (under_zero(trainer) and has_length(trainer.train_dataset)):
        return
    state = trainer.accelerator.state
    size = tensor_ranks(state) * sequence_ranks(state)
    if size > 1 and trainer.args.train_sampling_strategy == REBALANCED:
        raise ConfigError(
            f"train_sampling_strategy={REBALANCED!r} gives each rank batches of its own, and "
            f"{size} ranks share theirs by tensor or sequence parallelism; write "
            "train_sampling_strategy='group_by_length', or leave that parallelism out"
        )


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
        searches = self.hp_search_backend is not None and trial is not None
        if searches and self.args.deepspeed is None:
            raise ConfigError(
                "hyperparameter_search fills the ZeRO configuration anew from the arguments of "
                "each trial, and these have none; pass "
                "args=hf_zero.TrainingArguments(zero_config=...) to the Trainer, in place of a "
                "ZeroCallback or the launcher's configuration"
            )
        engine: object = self.deepspeed
        if is_engine(engine):
            if not engine.destroyed:  # by accelerator.free_memory(), or for a smaller batch
                engine.destroy_and_restore()
            # between the trials of a search there is no model
            self.model_wrapped, self.deepspeed = self.model, None  # type: ignore[assignment]
            if resume_from_checkpoint in (None, False) and self.model_init is None:
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


def prepare_engine(
    original: Original,
    self: Trainer,
    max_steps: int,
    train_dataloader: object,
    resume_from_checkpoint: object,
) -> object:
    """Wraps ``Trainer._prepare_for_training``: raises ConfigError if the trained model is wrapped
    in anything but the engine.
    """
    if not under_zero(self):
        return original(self, max_steps, train_dataloader, resume_from_checkpoint)
    _keep_given_optimizer(self)
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
    self.accelerator.deepspeed_engine_wrapped.caller = StepCaller.OPTIMIZER
    if engine.config.checkpoint.save_on_signal or self.args.enable_jit_checkpoint:
        save_on_signals(self, engine)
    return result


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


def know_the_tensor_ranks(original: Callable[[Trainer], int], self: Trainer) -> int:
    """Wraps ``Trainer.get_tp_size``: returns the tensor parallel size of the configuration, from
    any route; at least 1.
    """
    if not under_zero(self):
        return original(self)
    return max(original(self), tensor_ranks(self.accelerator.state))


def count_tokens_once(original: Original, self: Trainer, inputs: object) -> None:
    """Wraps ``Trainer._track_num_input_tokens``: counts the tokens of one of the tensor-parallel
    ranks, and those of all batches of a window.
    """
    before = self.state.num_input_tokens_seen
    for batch in batches_of(inputs):
        original(self, batch)
    if under_zero(self):
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()


def _keep_given_optimizer(trainer: Trainer) -> None:
    import torch
    from accelerate.optimizer import AcceleratedOptimizer

    # An optimizer wrapped by Accelerate is not the user's, but that of an earlier train().
    if isinstance(trainer.optimizer, torch.optim.Optimizer) and not isinstance(
        trainer.optimizer, AcceleratedOptimizer
    ):
        setattr(trainer, GIVEN, (trainer.optimizer, trainer.lr_scheduler))


def keep_what_was_given(
    original: Original, trainer: Trainer, num_training_steps: int, inference: bool = False
) -> tuple[Optimizer | None, LRScheduler | None]:
    """Wraps ``deepspeed_init``: keeps ``Trainer(optimizers=…)`` and the level of hf-zero's logger
    as set by the user.
    """
    if not under_zero(trainer):
        return original(trainer, num_training_steps, inference=inference)
    level = logger.level
    try:
        _warn_of_section(trainer)
        with _given_optimizer(trainer) as scheduler:
            prepared, wrapped = original(trainer, num_training_steps, inference=inference)
    finally:
        logger.setLevel(level)
    return prepared, scheduler if wrapped is None else wrapped


def _warn_of_section(trainer: Trainer) -> None:
    """Warn of a class that makes an optimizer of its own, which the configuration's replaces: it
    trains the parameters of the model alone.
    """
    from transformers import Trainer as Stock

    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    for name in ("create_optimizer", "get_optimizer_cls_and_kwargs"):
        if "optimizer" in config and getattr(type(trainer), name) is not getattr(Stock, name):
            log_rank0(
                f"the section optimizer of the ZeRO config, {config['optimizer'].get('type')!r}, "
                f"replaces the optimizer of {type(trainer).__name__}.{name}: it trains the "
                "parameters of the model alone, and others, such as the weights of a loss, stay "
                "as they are; remove the section, if that is not meant",
                logging.WARNING,
            )


@contextmanager
def _given_optimizer(trainer: Trainer) -> Iterator[LRScheduler | None]:
    """Make the stock code use the optimizer given to the Trainer; yield the scheduler given with
    it. Raises ConfigError if the configuration has an optimizer, too.
    """
    optimizer, scheduler = getattr(trainer, GIVEN, (None, None))
    if optimizer is None:
        yield None
        return
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    if "optimizer" in config:
        raise ConfigError(
            f"Trainer(optimizers=…) gives {type(optimizer).__name__} and the ZeRO config gives "
            f"{config['optimizer'].get('type')!r}; remove one of them"
        )

    def create_optimizer(model: object = None) -> Optimizer:
        trainer.optimizer = optimizer
        return optimizer

    with replaced(trainer, create_optimizer=create_optimizer):
        yield scheduler


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


def save_untrained(
    original: Original, self: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Wraps ``Trainer.save_model``: saves a model that was never trained, and returns when the
    files of a running save are complete. Checkpoints of the Trainer include whole weights according
    to stage3_gather_16bit_weights_on_model_save, and always if they hold the model alone.
    """
    if not under_zero(self):
        original(self, output_dir, _internal_call)
        return
    if output_dir is not None:
        output_dir = save_folder(output_dir)
    engine = engine_of(self)
    if engine is not None:
        # push_to_hub, the other internal caller, passes no folder
        in_checkpoint = _internal_call and output_dir is not None
        beside_shards = in_checkpoint and not self.args.save_only_model
        with replaced(engine, saving_in_checkpoint=beside_shards):
            if engine.zero_gather_16bit_weights_on_model_save() or _is_adapted(self.model):
                original(self, output_dir, _internal_call)
            else:
                _save_without_weights(self, engine, output_dir)
        engine.wait_for_checkpoint(below=output_dir or self.args.output_dir)
        return
    with replaced(self, is_deepspeed_enabled=False):
        original(self, output_dir, _internal_call)


def _is_adapted(model: object) -> bool:
    """Return whether ``model`` is one of PEFT, whose small weights are in every checkpoint."""
    from transformers.trainer import _is_peft_model

    return bool(_is_peft_model(model))


def _save_without_weights(trainer: Trainer, engine: EngineProtocol, folder: str | None) -> None:
    """Write what the Trainer keeps in a checkpoint beside the shards, without whole weights. The
    stock method would save the shards as well, a first time, and warn of a full checkpoint.
    """
    from transformers.trainer_pt_utils import remove_dummy_checkpoint
    from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    if engine not in _announced:
        _announced.add(engine)
        log_rank0(
            f"checkpoints hold shards and no {SAFE_WEIGHTS_NAME}, as {SAVE_WEIGHTS} is false: "
            f"`hf-zero convert-checkpoint {folder} OUT` writes one at any time; with true each "
            "checkpoint has it (zero3_save_16bit_model in a YAML of Accelerate)"
        )
    trainer._save(folder, state_dict={})
    remove_dummy_checkpoint(trainer.args.should_save, folder, [WEIGHTS_NAME, SAFE_WEIGHTS_NAME])


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


# the names whose optimizers of bitsandbytes have a counterpart, and the bits of their moments
NAMES: dict[str, tuple[type, int]] = {
    "adamw_bnb_8bit": (AdamW8bit, 8),
    "adamw_8bit": (AdamW8bit, 8),
    "paged_adamw_8bit": (AdamW8bit, 8),
    "paged_adamw_32bit": (AdamW8bit, 32),
    "lion_8bit": (Lion8bit, 8),
    "paged_lion_8bit": (Lion8bit, 8),
    "lion_32bit": (Lion8bit, 32),
    "paged_lion_32bit": (Lion8bit, 32),
}


def build_without_bitsandbytes(
    original: Original, self: Trainer, model: nn.Module | None = None
) -> object:
    """Wraps ``Trainer.create_optimizer``: names of bitsandbytes' optimizers give those of hf-zero
    where bitsandbytes is not installed. As with it, embeddings keep moments in fp32.
    """
    from transformers.utils import is_bitsandbytes_available

    args = self.args
    name = str(getattr(args.optim, "value", args.optim))
    chosen = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
    if name not in NAMES or chosen or is_bitsandbytes_available() or not under_zero(self):
        return original(self, model)
    cls, bits = NAMES[name]
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    if cls is AdamW8bit:
        settings["eps"] = args.adam_epsilon
    trained = self.model if model is None else model
    assert trained is not None
    for module in trained.modules():
        if isinstance(module, nn.Embedding):
            vars(module.weight)["optim_bits"] = 32
    with replaced(self, optimizer_cls_and_kwargs=(cls, {**settings, "optim_bits": bits})):
        return original(self, model)


def add_run(original: Original, self: Trainer, *args: object, **kwargs: object) -> None:
    """Wraps ``create_model_card``: adds the table of the run and its evaluations to the card that
    rank 0 has written.
    """
    original(self, *args, **kwargs)
    from hf_zero.engine import Engine

    path, engine = output_folder(self.args) / "README.md", engine_of(self)
    if isinstance(engine, Engine) and self.is_world_process_zero() and path.is_file():
        text = path.read_text(encoding="utf-8")
        path.write_text(_described(text, self, engine), encoding="utf-8")


def _described(text: str, trainer: Trainer, engine: Engine) -> str:
    from hf_zero.checkpoint.convert.card import carded, datasets_of, front_of
    from hf_zero.checkpoint.convert.run_facts import facts, last_numbers, recorded
    from hf_zero.checkpoint.save_sharded import manifest_of_run

    engine.measures.finish(engine)
    manifest = manifest_of_run(engine)
    folders = [engine.measures.folder, output_folder(trainer.args)]
    record = recorded([folder for folder in folders if folder is not None], manifest.counters)
    figures = last_numbers(trainer.state.log_history)
    return carded(text, facts(manifest, record, figures, datasets_of(front_of(text))), figures)
