"""``deepspeed.zero`` and ``deepspeed.runtime.zero``."""

from hf_zero.core.gathered import GatheredParameters
from hf_zero.integrations.building import Init, register_external_parameter

from . import partition_parameters

__all__ = ["GatheredParameters", "Init", "partition_parameters", "register_external_parameter"]
