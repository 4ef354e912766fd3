"""The rows of the key table about offload, and when a value that was written has no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hf_zero.config.kinds import (
    BLOCK,
    BOOLEAN,
    ELEMENTS,
    PATHS,
    SHARE,
    SIZE,
    SOME_OR_AUTO,
    Kind,
    choice,
    integer,
)
from hf_zero.config.rows import Key, Status, active, inert, unbuilt, under

_DEVICE = choice("none", "cpu", "nvme")
_OPTIMIZER = "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"


def _idle_unless(section: str, *devices: str) -> Callable[[Mapping[str, Any]], str]:
    """What to say of a key that only matters when the device of its section is one of
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


_ANY = _idle_unless(_OPTIMIZER, "cpu", "nvme")
_FILES = _idle_unless(_OPTIMIZER, "nvme")
_PARAM_ANY = _idle_unless(_PARAM, "cpu", "nvme")
_PARAM_FILES = _idle_unless(_PARAM, "nvme")


def _row(
    section: str,
    name: str,
    kind: Kind,
    default: Any,
    note: str,
    idle: Callable[[Mapping[str, Any]], str] | None = None,
    field: str = "",
) -> Key:
    return active(
        f"zero_optimization.{section}.{name}",
        kind,
        default,
        f"{section}.{field or name}",
        note,
        idle,
    )


_opt, _par = partial(_row, "offload_optimizer"), partial(_row, "offload_param")

# Translated as they are read: they name no field of their own.
FORMER = under(
    "zero_optimization",
    Key("cpu_offload", BOOLEAN, Status.ACTIVE),
    Key("cpu_offload_param", BOOLEAN, Status.ACTIVE),
    Key("cpu_offload_use_pin_memory", BOOLEAN, Status.ACTIVE),
)

OFFLOAD = (
    _opt("device", _DEVICE, "none", "where master weights, moments and gradients live"),
    _opt("nvme_path", PATHS, None, "folders of the optimizer's files, striped", _FILES),
    _opt("pin_memory", BOOLEAN, None, "page-locked memory; null: where there is a GPU", _ANY),
    _opt("buffer_count", integer(1), 4, "pieces under way between files and the update", _FILES),
    _opt(
        "buffer_size", ELEMENTS, 16_777_216, "elements of a piece that is updated at a time", _ANY
    ),
    _opt("pipeline_read", BOOLEAN, True, "read the next piece during the update", _FILES),
    _opt("pipeline_write", BOOLEAN, True, "write the last piece during the update", _FILES),
    _opt(
        "ratio",
        SOME_OR_AUTO,
        1.0,
        "share that is offloaded; auto: what does not fit on the device",
        _ANY,
    ),
    _opt("moments", choice("fp32", "bf16", "int8"), "fp32", "what moments are stored in", _ANY),
    _opt(
        "update_in_backward",
        BOOLEAN,
        False,
        "update a unit once its gradient has landed",
        _idle_in_backward,
    ),
    _opt(
        "cpuadam_cores_perc", SHARE, 1.0, "share of this rank's cores that updates", _ANY, "cores"
    ),
    *under(
        "zero_optimization.offload_optimizer",
        inert("pipeline", BOOLEAN, "pipeline_read and pipeline_write say it"),
        inert(
            "fast_init",
            BOOLEAN,
            "files are made at their full size and filled with what training starts from",
        ),
        inert("super_offload", BOOLEAN, "the update on the CPU always runs beside the transfers"),
    ),
    _par("device", _DEVICE, "none", "where the chunks of parameters live; needs stage 3"),
    _par("nvme_path", PATHS, None, "folders of the parameters' files, striped", _PARAM_FILES),
    _par("pin_memory", BOOLEAN, None, "page-locked memory; null: where there is a GPU", _PARAM_ANY),
    _par(
        "buffer_count", integer(1), 5, "units under way between files and the device", _PARAM_FILES
    ),
    _par("buffer_size", ELEMENTS, 100_000_000, "most elements of one read", _idle_whole_shards),
    _par(
        "max_in_cpu", SIZE, 1_000_000_000, "elements of this rank that stay in memory", _PARAM_FILES
    ),
)

AIO = (
    active("aio.block_size", BLOCK, 1_048_576, note="bytes of one request", idle=_idle_aio),
    active("aio.queue_depth", integer(1), 32, note="requests under way", idle=_idle_aio),
    active(
        "aio.thread_count",
        integer(1),
        8,
        "aio.threads",
        "threads that read and write where io_uring is refused",
        _idle_aio,
    ),
    inert("aio.single_submit", BOOLEAN, "requests are submitted as the queue has room"),
    inert("aio.overlap_events", BOOLEAN, "requests are always submitted while others complete"),
    unbuilt("aio.use_gds", BOOLEAN, "reads from NVMe into GPU memory (GPUDirect Storage)"),
)

# Other spellings: the names of the dataclasses' fields, and DeepSpeed's for the number of threads.
OFFLOAD_ALIASES: dict[str, str] = {
    "offload_optimizer": _OPTIMIZER,
    "offload_param": _PARAM,
    f"{_OPTIMIZER}.cores": f"{_OPTIMIZER}.cpuadam_cores_perc",
    "zero_optimization.aio": "aio",
    "aio.threads": "aio.thread_count",
    "aio.intra_op_parallelism": "aio.thread_count",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
}
