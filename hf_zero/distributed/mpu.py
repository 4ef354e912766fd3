"""Model-parallel units (``mpu``), as Megatron's scripts pass them to ``initialize``: accepted if
they describe data parallelism only.
"""

from __future__ import annotations

from typing import Any

from hf_zero.errors import ConfigError, NotBuiltError

# The ways to split a model or a sample among ranks, with every name that Megatron and DeepSpeed
# have used for their sizes.
_SPLITS = {
    "model parallelism": (
        "get_tensor_model_parallel_world_size",
        "get_slice_parallel_world_size",
        "get_model_parallel_world_size",
    ),
    "pipeline parallelism": (
        "get_pipeline_model_parallel_world_size",
        "get_pipe_parallel_world_size",
    ),
    "sequence parallelism": ("get_sequence_parallel_world_size",),
    "context parallelism": ("get_context_parallel_world_size",),
    "expert parallelism": ("get_expert_model_parallel_world_size",),
}
_DATA = "get_data_parallel_world_size"


def check_mpu(mpu: Any, world_size: int) -> None:
    """Raise unless ``mpu`` reports that all ``world_size`` ranks hold the same model and read
    different data.

    Sizes that it lacks count as 1, as in the scripts' own code. Raises NotBuiltError for a split
    model or sample, and ConfigError if its data-parallel ranks are not all ranks.
    """
    for kind, names in _SPLITS.items():
        for name in names:
            size = _ask(mpu, name)
            if size is not None and size > 1:
                raise NotBuiltError(
                    f"initialize(mpu=...): mpu.{name}() is {size}, and {kind} is not built in this "
                    "version; make it 1: ZeRO shards the model over "
                    "the data-parallel ranks"
                )
    replicas = _ask(mpu, _DATA)
    if replicas is not None and replicas != world_size:
        raise ConfigError(
            f"initialize(mpu=...): mpu.{_DATA}() is {replicas}, but {world_size} ranks were "
            "started and no other parallelism is named; let its "
            "data-parallel group hold all ranks, or leave mpu out"
        )


def _ask(mpu: Any, name: str) -> int | None:
    method = getattr(mpu, name, None)
    return None if method is None else int(method())
