"""``deepspeed.checkpointing``: activation checkpointing under DeepSpeed's names, done by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from hf_zero.integrations.not_built import refuse

_OPTIONS = ("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu")
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
    """Accept DeepSpeed's settings. Those that would change where activations lie raise NotBuiltError when they are true."""
    global _configured
    asked = dict(zip(_OPTIONS, (partition_activations, contiguous_checkpointing, checkpoint_in_cpu)))
    for name, value in asked.items():
        if value:
            refuse(f"deepspeed.checkpointing.configure({name}=True)", "leave it out: activations are recomputed, and stay on the device")
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Between passes there is nothing to forget: no activation buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` and recompute it in backward."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
