"""``deepspeed.checkpointing``: activation checkpointing under DeepSpeed's names, done by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from hf_zero.config import ZeroConfig
from hf_zero.core import comm
from hf_zero.core.mpu import check_mpu
from hf_zero.integrations.not_built import refuse

_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept DeepSpeed's settings; which of them act, the section ``activation_checkpointing`` of the configuration says, too.

    Activations are divided among model-parallel ranks, of which there is one, so the options of that change nothing. Raises
    NotBuiltError for ``checkpoint_in_cpu`` and ``profile``, and for an ``mpu_`` that splits the model.
    """
    global _configured
    if mpu_ is not None:
        check_mpu(mpu_, comm.get_world_size())
    if deepspeed_config is not None:
        ZeroConfig.coerce(deepspeed_config, allow_auto=True)
    for name, value in (("checkpoint_in_cpu", checkpoint_in_cpu), ("profile", profile)):
        if value:
            refuse(f"deepspeed.checkpointing.configure({name}=True)", "leave it out: activations are recomputed, and stay on the device")
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Between passes there is nothing to forget: no activation buffers are kept."""


def set_num_layers(nlayers: int) -> None:
    """The number of checkpoints: it sizes DeepSpeed's buffers for divided activations, which are not needed here."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Whether to divide activations among the model-parallel ranks, of which there is one."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` and recompute it in backward."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
