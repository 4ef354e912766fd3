"""``deepspeed.tp_model_init``, which the Trainer calls for ``tensor_parallel.autotp_size``, and the
names around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_zero.deepspeed.modules import refuse
from hf_zero.parallel.tensor import tensor_parallel
from hf_zero.zero.layout.sharding import sharding_of


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, tp_group: Any = None
) -> nn.Module:
    """Run :func:`hf_zero.tensor_parallel`. ``dtype`` and ``config`` are ignored: ``initialize``
    gets those of the training. Raises NotBuiltError for a group of the caller's.
    """
    if tp_group is not None:
        refuse("tp_model_init(tp_group=...)", "leave it out: hf-zero makes the groups of tp_size")
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
        parameters = [params] if isinstance(params, torch.Tensor) else params
        self._split = enabled and any("tensor" in sharding_of(p).axes for p in parameters)

    def __enter__(self) -> None:
        if self._split:
            refuse("GatherReplacedLayerParams", "take them from model.state_dict(), on all ranks")

    def __exit__(self, *exc: object) -> None:
        pass
