"""Tensor parallelism from the configuration, and from a model that is cut already."""

from __future__ import annotations

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.parallelism import AUTOEP_SIZE, TENSOR_SIZE, VERIFY
from hf_zero.config.resolving import SEQUENCE
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor.model import model_record, tensor_parallel


def as_configured(model: nn.Module, config: ZeroConfig) -> ZeroConfig:
    """Cut ``model`` as ``config`` says, unless it is cut already; return the configuration with the
    size in effect (collective). Adapters added since are cut with their layers.

    Raises ConfigError if the two give different sizes.
    """
    record, size = model_record(model), config.tensor_parallel.size
    if record is not None and size == 1:
        size = record.size
        if config.tensor_parallel.autotp_size == 1:
            raise ConfigError(
                f"{TENSOR_SIZE} is 1 and the model is cut among {size} ranks already; write {size},"
                " or leave it out"
            )
        config = config.override({TENSOR_SIZE: size}, "computed: the model is cut already")
    if size > 1:
        if config.tensor_parallel.verify:
            _check_alone(config)
        tensor_parallel(model, size, verify=config.tensor_parallel.verify)
    return config


def _check_alone(config: ZeroConfig) -> None:
    """Raise ConfigError if a rank would not compute, on its batch, the same as one process."""
    others = {AUTOEP_SIZE: config.expert_parallel.size, SEQUENCE: config.sequence_parallel_size}
    for key, size in others.items():
        if size > 1:
            raise ConfigError(
                f"{VERIFY} compares each rank with the whole model on its batch, and {key} = "
                f"{size} spreads that over ranks; verify with {key} = 1, and remove the key then"
            )


def readers() -> tuple[int, int]:
    """Return the number of ranks that read different batches, as far as tensor and pipeline
    parallelism determine it, and the index of this rank among them.
    """
    ranks, rank, groups = process_group.get_world_size(), process_group.get_rank(), get_parallel()
    if groups is not None:
        ranks //= groups.dims.pipeline
        rank %= ranks
    size = 1 if groups is None else groups.dims.tensor
    return ranks // size, rank // size


def ranks_of_a_stage() -> int:
    """Return the number of ranks that batch sizes are computed for: all ranks of the job; in a
    pipeline, the ranks of one stage that read different batches.
    """
    groups = get_parallel()
    stages = 1 if groups is None else groups.dims.pipeline
    return process_group.get_world_size() if stages == 1 else readers()[0]
