"""Sequence parallelism from the configuration and the ``mpu`` of ``initialize``."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError
from hf_zero.logging import log_rank0
from hf_zero.parallel.sequence.attention import KEY
from hf_zero.parallel.sequence.sequence_parallel import (
    OnModel,
    SequenceParallel,
    attention_of_models,
    sequence_parallel,
)

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"


def sequence_of(config: ZeroConfig, mpu: Any) -> tuple[ZeroConfig, SequenceParallel | None]:
    """Return ``config`` with the size that it or ``mpu`` gives, and the sequence parallelism of the
    job, or None. Collective.

    A train batch size beside an ``mpu`` is computed anew: Accelerate computes it from the sizes of
    its own ParallelismConfig, which may not match the number of ranks. Raises ConfigError if the
    two contradict each other.
    """
    written = config.sequence_parallel_size
    if not isinstance(mpu, SequenceParallel):
        return config, sequence_parallel(written) if written > 1 else None
    if written not in (1, mpu.size):
        raise ConfigError(
            f"{KEY} = {written} ({config.sources[KEY]}) contradicts the mpu of {mpu.size} ranks "
            "that initialize was given; remove one of them"
        )
    _refuse_former_groups(mpu)
    config = config.override({KEY: mpu.size}, "the mpu of initialize")
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.train_batch_size is not None and micro is not None and steps is not None:
        total = micro * steps * (process_group.get_world_size() // mpu.size)
        if total != config.train_batch_size:
            log_rank0(
                f"{TOTAL} = {config.train_batch_size} ({config.sources[TOTAL]}) is taken for "
                f"{total}: {MICRO} x gradient_accumulation_steps x (ranks / {KEY})",
                logging.WARNING,
            )
            config = config.without(TOTAL)
    return config, mpu if mpu.size > 1 else None


def _refuse_former_groups(mpu: SequenceParallel) -> None:
    """Raise ConfigError if other parallelism, set up after ``mpu``, has changed its groups'
    ranks.
    """
    groups = get_parallel()
    if groups is not None and groups.along("sequence").ranks != mpu.dim.ranks:
        raise ConfigError(
            "hf_zero.sequence_parallel was called before this job became tensor or "
            "pipeline parallel, which has moved the ranks that share a sequence; call it "
            "afterwards, as after hf_zero.tensor_parallel(model, size)"
        )


def check_model(model: nn.Module, sequence: SequenceParallel | None) -> None:
    """Raise ConfigError for a model with unsupported attention, before anything is created."""
    groups = get_parallel()
    if sequence is not None:
        attention_of_models().check(model, sequence.size, groups.dims.tensor if groups else 1)


def on_model(sequence: SequenceParallel | None) -> dict[str, OnModel]:
    """Return the techniques for an engine to install on its model for sequence parallelism."""
    return {} if sequence is None else {KEY: OnModel(sequence)}
