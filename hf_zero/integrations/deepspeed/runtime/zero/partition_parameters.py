"""``deepspeed.runtime.zero.partition_parameters``."""

from torch import arange as _orig_torch_arange

from hf_zero.core.gathered import GatheredParameters
from hf_zero.core.parameter import ZeroParamStatus
from hf_zero.integrations.device import get_accelerator
from hf_zero.integrations.transformers.building import (
    Init,
    register_external_parameter,
    zero_wrapper_for_fp_tensor_constructor,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "_orig_torch_arange",
    "get_accelerator",
    "register_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
