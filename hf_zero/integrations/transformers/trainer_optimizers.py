"""The optimizer of a Trainer under ZeRO: the one given to it is kept, and names of 8-bit optimizers
work without bitsandbytes. Imported while ``import transformers`` runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_route import under_zero
from hf_zero.logging import log_rank0, logger
from hf_zero.optim import AdamW8bit, Lion8bit

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import Trainer


GIVEN = "_hf_zero_given"


def keep_given_optimizer(trainer: Trainer) -> None:
    import torch
    from accelerate.optimizer import AcceleratedOptimizer

    # An optimizer wrapped by Accelerate is not the user's, but that of an earlier train().
    if isinstance(trainer.optimizer, torch.optim.Optimizer) and not isinstance(
        trainer.optimizer, AcceleratedOptimizer
    ):
        # A schedule that the Trainer has made, called by the script, is made anew by each train().
        scheduler = None if trainer._created_lr_scheduler else trainer.lr_scheduler
        setattr(trainer, GIVEN, (trainer.optimizer, scheduler))


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


# the names whose optimizers of bitsandbytes have a counterpart, and the bits of their moments
NAMES: dict[str, tuple[type, int]] = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), (AdamW8bit, 8)),
    "paged_adamw_32bit": (AdamW8bit, 32),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (Lion8bit, 8)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (Lion8bit, 32)),
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
