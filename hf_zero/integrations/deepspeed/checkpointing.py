"""``deepspeed.checkpointing``: activation checkpointing."""

from hf_zero.integrations.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from hf_zero.integrations.checkpointing import checkpoint as non_reentrant_checkpoint
from hf_zero.integrations.random_states import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
