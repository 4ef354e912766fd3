"""``deepspeed.checkpointing``: activation checkpointing under DeepSpeed's names, implemented by
torch.utils.checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_zero.activations import checkpointing as recompute
from hf_zero.activations.offload import Offload
from hf_zero.activations.policy import offload_of
from hf_zero.config import ZeroConfig
from hf_zero.config.activations import ActivationCheckpointing, ActivationOffload
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_dims import check_mpu


@dataclass
class _Settings:
    """The arguments of :func:`configure`."""

    configured: bool = False
    config: ZeroConfig = field(default_factory=lambda: ZeroConfig(0))
    in_cpu: bool = False
    timing: recompute.Timing | None = None
    offload: Offload | None = None


_settings = _Settings()


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure :func:`checkpoint` from the section ``activation_checkpointing`` of a
    configuration; arguments override it.

    ``checkpoint_in_cpu`` keeps the inputs of checkpoints in host memory until their backward.
    ``profile`` logs the time of forwards and recomputations, ``synchronize`` waits for the device
    around each. Activations are divided among model-parallel ranks, of which there is one, so the
    options for that change nothing. Raises NotBuiltError for an ``mpu_`` that splits the model.
    """
    global _settings
    if mpu_ is not None:
        check_mpu(mpu_, process_group.get_world_size())
    config = ZeroConfig(0)
    if deepspeed_config is not None:
        config = ZeroConfig.coerce(deepspeed_config, allow_auto=True, foreign=True)
    section, device = config.section_of(ActivationCheckpointing), process_group.default_device()
    profiles = section.profile if profile is None else profile
    waits = section.synchronize if synchronize is None else synchronize
    if _settings.offload is not None:
        _settings.offload.close()
    _settings = _Settings(
        configured=True,
        config=config,
        in_cpu=section.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu,
        timing=recompute.Timing(device, profiles, process_group.get_rank() == 0)
        if profiles or waits
        else None,
    )


def is_configured() -> bool:
    return _settings.configured


def reset() -> None:
    """Free, between passes, what a forward without a backward has left offloaded."""
    if _settings.offload is not None:
        _settings.offload.end()


def set_num_layers(nlayers: int) -> None:
    """Ignore the number of checkpoints: it sizes DeepSpeed's buffers for divided activations, which
    are not needed here.
    """


def checkpoint(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run ``function(*args, **kwargs)`` and recompute it in backward."""
    if _settings.in_cpu and _settings.offload is None:
        _settings.offload = offload_of(
            process_group.default_device(), _settings.config.section_of(ActivationOffload)
        )
    offload = contextlib.nullcontext() if _settings.offload is None else _settings.offload.part()
    with offload:
        return recompute.checkpoint(function, _settings.timing, args, kwargs)
