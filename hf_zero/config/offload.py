"""Configuration of offload: the devices of the optimizer and the parameters, and file I/O. Checks
across keys are in :mod:`hf_zero.config.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config.kinds import (
    BLOCK,
    BOOLEAN,
    ELEMENTS,
    PATHS,
    SHARE,
    SIZE,
    SOME_OR_AUTO,
    choice,
    integer,
)
from hf_zero.config.rows import Key, Status, inert, key, unbuilt, under

OffloadDevice = Literal["none", "cpu", "nvme"]
Moments = Literal["fp32", "bf16", "int8"]

_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"
_DEVICE = choice("none", "cpu", "nvme")
_PIN = "use page-locked memory; null uses it if there is a GPU"


def _idle_unless(section: str, *devices: str) -> Callable[[Mapping[str, Any]], str]:
    """Return an ``idle`` function for keys that act only if the section's device is one of
    ``devices``.
    """

    def idle(values: Mapping[str, Any]) -> str:
        device = values.get(f"{section}.device", "none")
        return "" if device in devices else f"{section}.device is {device}"

    return idle


def _idle_aio(values: Mapping[str, Any]) -> str:
    on = "nvme" in (values.get(f"{section}.device") for section in (_OPTIMIZER, _PARAM))
    return "" if on else "nothing is offloaded to nvme"


def _idle_in_backward(values: Mapping[str, Any]) -> str:
    if not values.get(f"{_OPTIMIZER}.update_in_backward"):
        return _ANY(values)
    if values.get("gradient_clipping"):
        return "the norm that gradient_clipping needs is known when backward has ended"
    if values.get("fp16.enabled"):
        return "whether fp16 gradients overflowed is known when backward has ended"
    return _ANY(values)


def _idle_whole_shards(values: Mapping[str, Any]) -> str:
    return _PARAM_FILES(values) or "the shard of a unit is read and written whole"


def _idle_below_stage_3(values: Mapping[str, Any]) -> str:
    stage = values.get("zero_optimization.stage", 0)
    return (
        f"at stage {stage} every rank computes with whole parameters"
        if values.get(f"{_PARAM}.device", "none") != "none" and stage != 3
        else ""
    )


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
    moments are stored: int8 has a scale for every 256 numbers in addition. ``update_in_backward``
    starts a unit's update as soon as its gradient has reached the host, unless clipping or fp16
    prevents it; after the last backward of a window only ``step`` may then be called, because the
    update cannot be undone. ``cores`` is the share of this rank's CPU cores used by the update.
    ``pin_memory`` None pins where there is a GPU.
    """

    device: OffloadDevice = key(
        _DEVICE, "none", "where to keep master weights, moments and gradients"
    )
    nvme_path: tuple[str, ...] = key(
        PATHS,
        None,
        "folder for the optimizer's files; data is striped over several folders",
        idle=_FILES,
        default=(),
    )
    pin_memory: bool | None = key(BOOLEAN, None, _PIN, idle=_ANY)
    buffer_count: int = key(
        integer(1), 4, "number of pieces in flight between files and the update", idle=_FILES
    )
    buffer_size: int = key(
        ELEMENTS,
        16_777_216,
        "number of elements that are updated at a time",
        idle=_ANY,
        unit="elements",
    )
    pipeline_read: bool = key(BOOLEAN, True, "read the next piece during the update", idle=_FILES)
    pipeline_write: bool = key(
        BOOLEAN, True, "write the previous piece during the update", idle=_FILES
    )
    ratio: float | Literal["auto"] = key(
        SOME_OR_AUTO,
        1.0,
        "the share of the state to offload; auto offloads as much as does not fit on the device",
        idle=_ANY,
    )
    moments: Moments = key(
        choice("fp32", "bf16", "int8"), "fp32", "the dtype in which moments are stored", idle=_ANY
    )
    update_in_backward: bool = key(
        BOOLEAN,
        False,
        "update each unit as soon as its gradient is in host memory",
        idle=_idle_in_backward,
    )
    cores: float = key(
        SHARE,
        1.0,
        "the share of this rank's cores that run the update",
        name="cpuadam_cores_perc",
        idle=_ANY,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvme_path", _paths(self.nvme_path))

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device != "none"


@dataclass(frozen=True)
class OffloadParam:
    """Offload of the parameter chunks at stage 3 (arXiv 2104.07857).

    "cpu" is host memory. "nvme" is files under ``nvme_path``, except for the first ``max_in_cpu``
    elements of this rank, which stay in host memory; ``buffer_count`` units are in flight.
    ``buffer_size`` has no effect: a unit's shard is read whole.
    """

    device: OffloadDevice = key(
        _DEVICE,
        "none",
        "where to keep the shards of parameters at stage 3",
        idle=_idle_below_stage_3,
    )
    nvme_path: tuple[str, ...] = key(
        PATHS,
        None,
        "folder for the parameters' files; data is striped over several folders",
        idle=_PARAM_FILES,
        default=(),
    )
    pin_memory: bool | None = key(BOOLEAN, None, _PIN, idle=_PARAM_ANY)
    buffer_count: int = key(
        integer(1), 5, "number of units in flight between files and the device", idle=_PARAM_FILES
    )
    buffer_size: int = key(
        ELEMENTS,
        100_000_000,
        "the largest number of elements per read",
        idle=_idle_whole_shards,
        unit="elements",
    )
    max_in_cpu: int = key(
        SIZE,
        1_000_000_000,
        "number of this rank's elements that stay in host memory",
        idle=_PARAM_FILES,
        unit="elements",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvme_path", _paths(self.nvme_path))

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device != "none"


@dataclass(frozen=True)
class AioSection:
    """File I/O: requests of ``block_size`` bytes, at most ``queue_depth`` in flight, through
    io_uring, or through ``threads`` threads where the kernel refuses io_uring.
    """

    block_size: int = key(BLOCK, 1_048_576, "bytes per request", idle=_idle_aio, unit="bytes")
    queue_depth: int = key(integer(1), 32, "number of requests in flight", idle=_idle_aio)
    threads: int = key(
        integer(1),
        8,
        "number of threads that read and write if io_uring is not available",
        name="thread_count",
        idle=_idle_aio,
    )


def _paths(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


# DeepSpeed's former keys, translated while reading: they have no field of their own.
FORMER = under(
    "zero_optimization",
    Key(
        "cpu_offload",
        BOOLEAN,
        Status.ACTIVE,
        "a former key; write offload_optimizer with device cpu",
    ),
    Key(
        "cpu_offload_param",
        BOOLEAN,
        Status.ACTIVE,
        "a former key; write offload_param with device cpu",
    ),
    Key(
        "cpu_offload_use_pin_memory",
        BOOLEAN,
        Status.ACTIVE,
        "a former key; write pin_memory in offload_optimizer and offload_param",
    ),
)

OFFLOAD = (
    *under(
        _OPTIMIZER,
        inert("pipeline", BOOLEAN, "set pipeline_read and pipeline_write"),
        inert(
            "fast_init",
            BOOLEAN,
            "hf-zero creates files at their full size and fills them with the initial state",
        ),
        inert("super_offload", BOOLEAN, "the update on the CPU always overlaps the transfers"),
    ),
    inert("aio.single_submit", BOOLEAN, "hf-zero submits requests as soon as the queue has room"),
    inert("aio.overlap_events", BOOLEAN, "hf-zero always submits requests while others complete"),
    unbuilt("aio.use_gds", BOOLEAN, "reads from NVMe into GPU memory (GPUDirect Storage)"),
)

# Alternative spellings: sections at the top level, and DeepSpeed's former names.
OFFLOAD_ALIASES: dict[str, str] = {
    "offload_optimizer": _OPTIMIZER,
    "offload_param": _PARAM,
    "zero_optimization.aio": "aio",
    "aio.intra_op_parallelism": "aio.thread_count",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
}
