"""Configuration of the tiers of training state: offload of the optimizer and the parameters, file
I/O. Checks across keys are in :mod:`hf_zero.config.refusals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hf_zero.config.value_types import (
    BLOCK,
    BOOLEAN,
    ELEMENTS,
    PATHS,
    SHARE,
    SIZE,
    SOME_OR_AUTO,
    choice,
    integer,
    key,
)

OffloadDevice = Literal["none", "cpu", "nvme"]
Moments = Literal["fp32", "bf16", "int8"]

_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"
_DEVICE = choice("none", "cpu", "nvme")


def _idle_unless(section: str, *devices: str) -> Callable[[Mapping[str, object]], str]:
    """Return an ``idle`` function for keys that act only if the device is one of ``devices``."""

    def idle(values: Mapping[str, object]) -> str:
        device = values.get(f"{section}.device", "none")
        return "" if device in devices else f"{section}.device is {device}"

    return idle


def _idle_aio(values: Mapping[str, object]) -> str:
    on = "nvme" in (values.get(f"{section}.device") for section in (_OPTIMIZER, _PARAM))
    return "" if on else "nothing is offloaded to nvme"


def _idle_whole_shards(values: Mapping[str, object]) -> str:
    return _PARAM_FILES(values) or "the shard of a unit is read and written whole"


def _idle_below_stage_3(values: Mapping[str, object]) -> str:
    stage = values.get("zero_optimization.stage", 0)
    if values.get(f"{_PARAM}.device", "none") != "none" and stage != 3:
        return f"at stage {stage} every rank computes with whole parameters"
    return ""


_ANY = _idle_unless(_OPTIMIZER, "cpu", "nvme")
_FILES = _idle_unless(_OPTIMIZER, "nvme")
_PARAM_ANY = _idle_unless(_PARAM, "cpu", "nvme")
_PARAM_FILES = _idle_unless(_PARAM, "nvme")


@dataclass(frozen=True)
class OffloadOptimizer:
    """Offload of master weights, optimizer state and gradients, and of the update (arXiv
    2101.06840, 2104.07857).

    ``device`` "cpu" keeps them in host memory, "nvme" in files under ``nvme_path`` (several paths
    are striped). The update reads, computes and writes pieces of ``buffer_size`` elements, with
    ``buffer_count`` pieces in flight. ``ratio`` is the offloaded share of the trainable elements;
    "auto" keeps on the device what fits there. ``moments`` is the dtype in which the optimizer's
    moments are stored: int8 has a scale for every 256 numbers in addition. ``cores`` is the share
    of this rank's CPU cores used by the update. ``pin_memory`` None pins where there is a GPU.
    """

    device: OffloadDevice = key(_DEVICE, "none")
    nvme_path: tuple[str, ...] = key(PATHS, None, idle=_FILES, default=())
    pin_memory: bool | None = key(BOOLEAN, None, idle=_ANY)
    buffer_count: int = key(integer(1), 4, idle=_FILES)
    buffer_size: int = key(ELEMENTS, 16_777_216, idle=_ANY, unit="elements")
    pipeline_read: bool = key(BOOLEAN, True, idle=_FILES)
    pipeline_write: bool = key(BOOLEAN, True, idle=_FILES)
    ratio: float | Literal["auto"] = key(SOME_OR_AUTO, 1.0, idle=_ANY)
    moments: Moments = key(choice("fp32", "bf16", "int8"), "fp32", idle=_ANY)
    cores: float = key(SHARE, 1.0, name="cpuadam_cores_perc", idle=_ANY)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvme_path", _paths(self.nvme_path))

    @property
    def on(self) -> bool:
        """Return whether anything is offloaded."""
        return self.device != "none"


@dataclass(frozen=True)
class OffloadParam:
    """Offload of the parameter shards at stage 3 (arXiv 2104.07857).

    "cpu" is host memory. "nvme" is files under ``nvme_path``, except for the first ``max_in_cpu``
    elements of this rank, which stay in host memory; ``buffer_count`` units are in flight.
    ``buffer_size`` has no effect: a unit's shard is read whole.
    """

    device: OffloadDevice = key(_DEVICE, "none", idle=_idle_below_stage_3)
    nvme_path: tuple[str, ...] = key(PATHS, None, idle=_PARAM_FILES, default=())
    pin_memory: bool | None = key(BOOLEAN, None, idle=_PARAM_ANY)
    buffer_count: int = key(integer(1), 5, idle=_PARAM_FILES)
    buffer_size: int = key(ELEMENTS, 100_000_000, idle=_idle_whole_shards, unit="elements")
    max_in_cpu: int = key(SIZE, 1_000_000_000, idle=_PARAM_FILES, unit="elements")

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvme_path", _paths(self.nvme_path))

    @property
    def on(self) -> bool:
        """Return whether anything is offloaded."""
        return self.device != "none"


@dataclass(frozen=True)
class AioSection:
    """File I/O: requests of ``block_size`` bytes, at most ``queue_depth`` in flight, through
    io_uring, or through ``threads`` threads where the kernel refuses io_uring.
    """

    block_size: int = key(BLOCK, 1_048_576, idle=_idle_aio, unit="bytes")
    queue_depth: int = key(integer(1), 32, idle=_idle_aio)
    threads: int = key(integer(1), 8, name="thread_count", idle=_idle_aio)


def _paths(value: tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


# Alternative spellings: sections at the top level, and DeepSpeed's former names.
OFFLOAD_ALIASES: dict[str, str] = {
    "offload_optimizer": _OPTIMIZER,
    "offload_param": _PARAM,
    "zero_optimization.aio": "aio",
    "aio.intra_op_parallelism": "aio.thread_count",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
    f"{_OPTIMIZER}.update_in_backward": "zero_optimization.update_in_backward",
}
