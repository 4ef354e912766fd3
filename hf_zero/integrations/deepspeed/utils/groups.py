"""``deepspeed.utils.groups``: all ranks are data parallel; sequence parallel groups are not
built.
"""

from hf_zero.distributed.comm import get_rank as _get_data_parallel_rank
from hf_zero.distributed.comm import get_world_size as _get_data_parallel_world_size
from hf_zero.integrations.not_built import function

_INSTEAD = "set sp_size to 1"

_get_sequence_parallel_group = function(
    "deepspeed.utils.groups._get_sequence_parallel_group", _INSTEAD
)
_get_sequence_parallel_rank = function(
    "deepspeed.utils.groups._get_sequence_parallel_rank", _INSTEAD
)
_get_sequence_parallel_world_size = function(
    "deepspeed.utils.groups._get_sequence_parallel_world_size", _INSTEAD
)

__all__ = [
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
]
