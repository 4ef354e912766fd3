"""``deepspeed.zero`` and ``deepspeed.runtime.zero``."""

from hf_zero.core.gathered import GatheredParameters
from hf_zero.core.parameter import ZeroParamStatus
from hf_zero.integrations.not_built import type_of
from hf_zero.integrations.transformers.building import Init, register_external_parameter

from . import partition_parameters, stage3, stage_1_and_2

TiledLinear = type_of("deepspeed.zero.TiledLinear", "use nn.Linear: a unit is gathered whole")

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "ZeroParamStatus",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
]
