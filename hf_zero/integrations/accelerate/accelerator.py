"""The wrappers of ``Accelerator``: how models and optimizers are prepared, and whole state dicts.

Imported in the middle of ``import accelerate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.core.parameter import owner_of
from hf_zero.errors import PartitionError
from hf_zero.integrations import finder

AUTO = "auto"
TOTAL, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


def keep_the_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The script's optimizer stays what it is: the engine updates any that is element-wise
    (``map_pytorch_optim_to_deepspeed``).
    """

    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer if finder.chosen() else original(optimizer)

    return map_pytorch_optim_to_deepspeed


def prepare_engines(original: Callable[..., Any]) -> Callable[..., Any]:
    """What Accelerate and TRL expect of an engine, beside others and alone
    (``Accelerator._prepare_deepspeed``).
    """

    def _prepare_deepspeed(self: Any, *args: Any) -> Any:
        if not finder.chosen():
            return original(self, *args)
        _refuse_optimizer_alone(args)
        with _batch_size_left_open(self.deepspeed_plugin.deepspeed_config, args):
            result = original(self, *args)
        from hf_zero.core.engine import Engine
        from hf_zero.integrations.accelerate.multiple_models import join
        from hf_zero.integrations.accelerate.trl_offload_hooks import offer_offload_names

        for engine in result:
            if isinstance(engine, Engine) and engine.optimizer is not None:
                offer_offload_names(engine)
        join(self)
        return result

    return _prepare_deepspeed


def refuse_optimizer_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under ZeRO it and ``prepare_model`` would leave each rank to train a model of its own
    (``Accelerator.prepare_optimizer``).
    """

    def prepare_optimizer(self: Any, optimizer: Any, device_placement: Any = None) -> Any:
        if finder.chosen() and self.distributed_type == "DEEPSPEED" and self.num_processes > 1:
            raise PartitionError(
                f"accelerator.prepare_optimizer({type(optimizer).__name__}) under ZeRO: the model "
                "stays whole and its gradients are not averaged "
                "over the ranks; prepare both in one call, model, optimizer = "
                "accelerator.prepare(model, optimizer)"
            )
        return original(self, optimizer, device_placement)

    return prepare_optimizer


def empty_elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks without the consolidated weights get an empty state dict, as under FSDP
    (``Accelerator.get_state_dict``).
    """

    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        state = original(self, model, unwrap)
        return {} if state is None and finder.chosen() else state

    return get_state_dict


@contextmanager
def _batch_size_left_open(config: dict[str, Any], args: tuple[Any, ...]) -> Iterator[None]:
    """Accelerate asks for a data loader with a batch size where the config leaves it open; the
    engine trains without that number.
    """
    loaders = [each for each in args if isinstance(each, DataLoader)]
    taken = {}
    if config.get(MICRO) == AUTO and (
        not loaders or any(loader.batch_size is None for loader in loaders)
    ):
        taken = {key: config.pop(key) for key in (TOTAL, MICRO) if config.get(key) == AUTO}
    try:
        yield
    finally:
        # the model is still to come, perhaps with a data loader
        if not any(isinstance(each, nn.Module) for each in args):
            config.update(taken)


def _refuse_optimizer_alone(args: tuple[Any, ...]) -> None:
    """Raise PartitionError for an optimizer whose model has been prepared without it: that
    engine cannot step.
    """
    if any(isinstance(each, nn.Module) for each in args):
        return
    for optimizer in (each for each in args if isinstance(each, torch.optim.Optimizer)):
        owners = (
            owner_of(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )
        if any(flat is not None for flat in owners):
            raise PartitionError(
                f"accelerator.prepare() is given {type(optimizer).__name__} after its model: under "
                "ZeRO the model is laid out for its optimizer; "
                "prepare both in one call, model, optimizer = accelerator.prepare(model, optimizer)"
            )
