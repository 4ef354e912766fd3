"""What an ``Accelerator`` refuses under ZeRO: arguments of ``prepare`` that make no engine, and
calls that would train without one. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.config.resolving import MICRO
from hf_zero.config.techniques import PHASES
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.integrations import finder
from hf_zero.integrations.engine_protocol import EngineProtocol
from hf_zero.integrations.seams import Original
from hf_zero.logging import log_rank0
from hf_zero.zero.layout.flat_buffer import owner_of

if TYPE_CHECKING:
    from accelerate import Accelerator


def refuse_several_models(
    original: Original, self: Accelerator, *args: object, **kwargs: object
) -> object:
    """Wraps ``Accelerator.prepare``: raises ConfigError under ZeRO for several models in a call."""
    models = [type(value).__name__ for value in args if isinstance(value, nn.Module)]
    if len(models) > 1 and self.distributed_type == "DEEPSPEED" and finder.chosen():
        raise ConfigError(
            f"accelerator.prepare() got {len(models)} models ({', '.join(models)}), and one call "
            "makes one engine: prepare each model with its optimizer in a call of its own. The "
            "weights of a loss belong into the groups of the model's optimizer, and the loss stays "
            "out of prepare()"
        )
    return original(self, *args, **kwargs)


def refuse_pipelines(args: Sequence[object]) -> None:
    """Raise ConfigError for a pipeline: loops of Accelerate and the Trainer call a model."""
    from hf_zero.parallel.pipeline.staged import StagedModule

    if any(isinstance(value, StagedModule) for value in args):
        raise ConfigError(
            "Accelerator.prepare() got the stages of a pipeline, and its loops, the Trainer's too, "
            "call a model for its loss; call hf_zero.initialize(model=stages, ...) and train by "
            "engine.train_batch(), or shard the whole model at stage 3"
        )


def refuse_optimizer_alone(args: Sequence[object]) -> None:
    """Raise PartitionError for an optimizer whose model was prepared without it."""
    if any(isinstance(value, nn.Module) for value in args):
        return
    for optimizer in (value for value in args if isinstance(value, torch.optim.Optimizer)):
        owners = (owner_of(p) for group in optimizer.param_groups for p in group["params"])
        engines = [flat.live_engine for flat in owners if flat is not None]
        if any(getattr(engine, "optimizer", None) is not optimizer for engine in engines):
            raise PartitionError(
                f"accelerator.prepare() is given {type(optimizer).__name__} after its model: under "
                "ZeRO the model is laid out for its optimizer; "
                "prepare both in one call, model, optimizer = accelerator.prepare(model, optimizer)"
            )


def refuse_second_optimizer(args: Sequence[object]) -> None:
    """Raise ConfigError for several optimizers: Accelerate gives the last one to the engine, and
    says nothing of the others.
    """
    from accelerate.utils import DummyOptim

    optimizers = [value for value in args if isinstance(value, (torch.optim.Optimizer, DummyOptim))]
    if len(optimizers) > 1:
        raise ConfigError(
            f"accelerator.prepare() got {len(optimizers)} optimizers "
            f"({', '.join(type(optimizer).__name__ for optimizer in optimizers)}), and a model "
            "under ZeRO has one; pass one optimizer with several parameter groups, or prepare each "
            "model with its own optimizer in a call of its own"
        )


def warn_of_scheduler_alone(args: Sequence[object]) -> None:
    """Warn of a scheduler without its model, which Accelerate returns as it is under ZeRO."""
    if any(isinstance(value, nn.Module) for value in args):
        return
    for value in args:
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            name = type(value).__name__
            log_rank0(
                f"accelerator.prepare() is given {name} without its model: under ZeRO Accelerate "
                "returns it unwrapped, so each of its calls is a step, also inside "
                "accelerator.accumulate, and save_state leaves it out; prepare all in one call, "
                "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
                logging.WARNING,
            )


def refuse_other_micro_batches(engine: EngineProtocol) -> None:
    """Raise ConfigError for phases whose micro-batch size differs from the loader's."""
    from hf_zero.techniques.training_phases import phases_of

    phases = phases_of(engine)
    if phases is not None and phases.changes_micro_batches:
        engine.destroy()
        raise ConfigError(
            f"{PHASES} changes {MICRO}, and the data loader that was prepared brings batches of "
            "one size; leave the key out of the phases and change train_batch_size: the number of "
            "micro-batches follows"
        )


def refuse_optimizer_apart(
    original: Original, self: Accelerator, optimizer: object, device_placement: object = None
) -> object:
    """Wraps ``Accelerator.prepare_optimizer``: raises PartitionError on several ranks under ZeRO,
    where each rank would train an unsharded model with unaveraged gradients.
    """
    if finder.chosen() and self.distributed_type == "DEEPSPEED" and self.num_processes > 1:
        raise PartitionError(
            f"accelerator.prepare_optimizer({type(optimizer).__name__}) under ZeRO: the model "
            "stays whole and its gradients are not averaged over the ranks; prepare both in one "
            "call, model, optimizer = accelerator.prepare(model, optimizer)"
        )
    return original(self, optimizer, device_placement)


def refuse_backwards(
    original: Original, self: Accelerator, loss: torch.Tensor, **kwargs: object
) -> object:
    """Wraps ``Accelerator.backward``: raises PartitionError under ZeRO if no model was prepared,
    and for keywords of ``loss.backward`` that engines do not take.
    """
    if not finder.chosen() or self.distributed_type != "DEEPSPEED":
        return original(self, loss, **kwargs)
    asked = {key: value for key, value in kwargs.items() if value is not None}
    if others := sorted(asked.keys() - {"retain_graph", "scale_wrt_gas"}):
        raise PartitionError(
            f"accelerator.backward(loss, {others[0]}=...) under ZeRO: a backward reaches all "
            "parameters that train, and takes no keyword but retain_graph. In place of inputs "
            "freeze the other parameters, by requires_grad_(False) before the forward of this step"
        )
    if getattr(self, "deepspeed_engine_wrapped", None) is None:
        raise PartitionError(
            "accelerator.backward(loss) under ZeRO, and this Accelerator has prepared no model: "
            "no engine has computed this loss; prepare before the loop, model, optimizer, loader "
            "= accelerator.prepare(model, optimizer, loader), and train the model that it returns"
        )
    return original(self, loss, **asked)
