"""Refusal of torch's data-parallel wrappers around a model that an engine trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.integrations.seams import Original
from hf_zero.zero.layout.flat_buffer import engine_of
from hf_zero.zero.training_engine import TrainingEngine


def refuse_wrapper(
    original: Original, self: object, module: nn.Module, *args: Any, **kwargs: Any
) -> object:
    """Wraps the constructors of DDP, DataParallel and FSDP. Raises PartitionError for a ``module``
    with parameters that an engine trains.
    """
    _refuse_trained(type(self).__name__, (module,))
    return original(self, module, *args, **kwargs)


def refuse_forward(original: Original, self: nn.Module, *args: Any, **kwargs: Any) -> object:
    """Wraps the forwards of DDP and DataParallel, which a script may have put around the model
    before ``initialize``. Raises as :func:`refuse_wrapper` does, unless gradients are off.
    """
    if torch.is_grad_enabled():
        _refuse_trained(type(self).__name__, (self,))
    return original(self, *args, **kwargs)


def refuse_fully_shard(
    original: Original, self: object, modules: tuple[nn.Module, ...], *args: Any, **kwargs: Any
) -> object:
    """Wraps ``FSDPState.init``, which ``fully_shard`` and ``replicate`` call. Raises as
    :func:`refuse_wrapper` does.
    """
    _refuse_trained("fully_shard", modules)
    return original(self, modules, *args, **kwargs)


def _refuse_trained(wrapper: str, modules: tuple[nn.Module, ...]) -> None:
    """Raise PartitionError for a parameter that requires grad and that the optimizer of a live
    engine updates. A frozen part that a model shares with an engine is no obstacle.
    """
    if not all(isinstance(module, nn.Module) for module in modules):
        return  # an error of torch
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        engine = engine_of([parameter], TrainingEngine)
        if engine is not None and engine.bound is not None and parameter.requires_grad:
            raise PartitionError(
                f"{wrapper} around a model that an engine trains would reduce its gradients a "
                "second time, beside the engine's reduction; remove it, and call what "
                "hf_zero.initialize, or accelerator.prepare, has returned"
            )
