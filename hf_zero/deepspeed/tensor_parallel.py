"""``deepspeed.tp_model_init``, which the Trainer calls for ``tensor_parallel.autotp_size``, and the
tensor-parallel part of ``deepspeed.utils.groups``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.deepspeed.placeholders import refuse
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.zero.layout.sharding import sharding_of


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Run :func:`hf_zero.tensor_parallel`. ``dtype`` and ``config`` are ignored: ``initialize``
    gets those of the training; ``kwargs`` may name a group made by the caller, but hf-zero makes
    its own.
    """
    return tensor_parallel(model, tp_size)


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing: the same split serves training and generation."""


def get_group() -> Any:
    """Return the process group of the ranks that share this rank's layers, or None."""
    groups = get_parallel()
    return None if groups is None else groups.group("tensor")


def get_world_size() -> int:
    """Return the number of ranks that share a layer."""
    groups = get_parallel()
    return 1 if groups is None else groups.along("tensor").size


def get_rank() -> int:
    """Return this rank among them."""
    groups = get_parallel()
    return 0 if groups is None else groups.along("tensor").rank


def get_first_rank() -> int:
    """Return the global rank of the first of them."""
    return process_group.get_rank() - get_rank()


class GatherReplacedLayerParams:
    """Context in which parameters of layers that DeepSpeed's AutoTP has replaced are whole. Here no
    layer is replaced. Raises NotBuiltError on entering for parameters that tensor parallelism
    splits: a state dict has them whole.
    """

    def __init__(self, params: Any, module: nn.Module, enabled: bool = True) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self.enabled = enabled and any("tensor" in sharding_of(each).axes for each in given)
        self.module = module

    def __enter__(self) -> None:
        if self.enabled:
            refuse("GatherReplacedLayerParams", "take them from model.state_dict(), on all ranks")

    def __exit__(self, *exc: Any) -> None:
        pass
