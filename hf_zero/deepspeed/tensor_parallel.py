"""``deepspeed.tp_model_init``, which the Trainer calls for ``tensor_parallel.autotp_size``, and the
names around it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_zero.deepspeed.modules import refuse
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.zero.layout.sharding import sharding_of


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: object = None, config: object = None, **kwargs: object
) -> nn.Module:
    """Run :func:`hf_zero.tensor_parallel`. ``dtype`` and ``config`` are ignored: ``initialize``
    gets those of the training; ``kwargs`` may name a group made by the caller, but hf-zero makes
    its own.
    """
    return tensor_parallel(model, tp_size)


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing: the same split serves training and generation."""


class GatherReplacedLayerParams:
    """Context in which parameters of layers that DeepSpeed's AutoTP has replaced are whole. Here no
    layer is replaced. Raises NotBuiltError on entering for parameters that tensor parallelism
    splits: a state dict has them whole.
    """

    def __init__(
        self, params: torch.Tensor | Iterable[torch.Tensor], module: nn.Module, enabled: bool = True
    ) -> None:
        parameters = [params] if isinstance(params, torch.Tensor) else list(params)
        self.enabled = enabled and any(
            "tensor" in sharding_of(parameter).axes for parameter in parameters
        )
        self.module = module

    def __enter__(self) -> None:
        if self.enabled:
            refuse("GatherReplacedLayerParams", "take them from model.state_dict(), on all ranks")

    def __exit__(self, *exc: object) -> None:
        pass
