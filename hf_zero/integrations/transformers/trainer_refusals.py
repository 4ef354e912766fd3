"""Arguments of a Trainer that cannot train under ZeRO, refused before the engine is made. Imported
while ``import transformers`` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.errors import ConfigError
from hf_zero.integrations.accelerate.parallel_sizes import sequence_ranks, tensor_ranks
from hf_zero.integrations.transformers.trainer_route import under_zero

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


REBALANCED = "batch_rebalance"  # a value of train_sampling_strategy


def refuse_arguments(args: TrainingArguments) -> None:
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


def refuse_scheduler_alone(trainer: Trainer) -> None:
    """Raise ConfigError for a scheduler whose optimizer is not given: another one would train."""
    if under_zero(trainer) and trainer.optimizer is None and trainer.lr_scheduler is not None:
        name = type(trainer.lr_scheduler).__name__
        raise ConfigError(
            f"Trainer(optimizers=(None, {name})) gives a scheduler without its optimizer, and it "
            "would not set the rates of the one that the Trainer makes; pass both, "
            f"optimizers=(optimizer, {name}), or choose a schedule by lr_scheduler_type"
        )


def refuse_shared_completions(trainer: Trainer) -> None:
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


def refuse_rebalanced_batches(trainer: Trainer) -> None:
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


def refuse_trial(trainer: Trainer, trial: object) -> None:
    """Raise ConfigError for a trial of a search whose arguments have no configuration."""
    if (
        trainer.hp_search_backend is not None
        and trial is not None
        and trainer.args.deepspeed is None
    ):
        raise ConfigError(
            "hyperparameter_search fills the ZeRO configuration anew from the arguments of each "
            "trial, and these have none; pass args=hf_zero.TrainingArguments(zero_config=...) to "
            "the Trainer, in place of a ZeroCallback or the launcher's configuration"
        )
