"""How models come into being under ZeRO-3: whole on each rank, by the libraries' ordinary code, and sharded at initialize.

``zero.Init`` and Transformers' own zero3 loading exist so that no rank ever holds a whole model. This version keeps
their interface and not that saving, and says so once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.integrations import finder
from hf_zero.logs import log_rank0


@functools.cache
def _say_once() -> None:
    log_rank0("ZeRO-3: each rank builds and loads the whole model in its own memory; hf-zero shards it at initialize")


def load_whole(original: Callable[[], bool]) -> Callable[[], bool]:
    """Transformers loads as if there were no ZeRO-3 (``transformers.modeling_utils.is_deepspeed_zero3_enabled``)."""

    def is_deepspeed_zero3_enabled() -> bool:
        if not original():
            return False
        if not finder.chosen():
            return True
        _say_once()
        return False

    return is_deepspeed_zero3_enabled


class Init:
    """``deepspeed.zero.Init``: a context around the construction of a model, with all of DeepSpeed's arguments.

    Parameters built inside are ordinary ones, on the device and in the dtype the code asks for; ``initialize`` shards
    them and casts them. ``module`` is left as it is.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled
        if enabled:
            _say_once()

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``module`` uses ``parameter`` that another module owns.

    Accepted and not needed: a unit's parameters are gathered for every module that is called inside it, and parameters
    shared between units belong to their lowest common ancestor.
    """


def zero_wrapper_for_fp_tensor_constructor(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """DeepSpeed wraps tensor constructors inside ``Init``; hf-zero leaves them alone."""
    return function
