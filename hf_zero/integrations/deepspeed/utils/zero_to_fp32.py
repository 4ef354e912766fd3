"""``deepspeed.utils.zero_to_fp32``: whole weights out of a sharded checkpoint."""

from hf_zero.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from hf_zero.integrations.not_built import function

_INSTEAD = "a checkpoint of hf-zero is safetensors with a manifest, not DeepSpeed's pickles; use convert_zero_checkpoint_to_fp32_state_dict"

get_model_state_file = function("deepspeed.utils.zero_to_fp32.get_model_state_file", _INSTEAD)
get_optim_files = function("deepspeed.utils.zero_to_fp32.get_optim_files", _INSTEAD)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
]
