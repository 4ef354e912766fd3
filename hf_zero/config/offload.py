"""Offload: where the optimizer and the parameters live beside the device, and how files are read
and written.

The sections are small frozen dataclasses whose fields are rows of
:mod:`hf_zero.config.offload_keys`. :func:`settle` and :func:`check` hold what one key of theirs
means for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config.reading import Reading
from hf_zero.errors import ConfigError, NotBuiltError

OffloadDevice = Literal["none", "cpu", "nvme"]
Moments = Literal["fp32", "bf16", "int8"]

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"
MOMENTS = f"{OPTIMIZER}.moments"
BF16_STATES = "bf16.bf16_optimizer_states"
STAGE = "zero_optimization.stage"


@dataclass(frozen=True)
class OffloadOptimizer:
    """Where master weights, moments and gradients live, and where the update runs; see arXiv
    2101.06840 and 2104.07857.

    ``device`` "cpu" keeps them in memory of the host, "nvme" in files under ``nvme_path`` (several
    paths are striped). A piece of ``buffer_size`` elements is read, updated and written at a time,
    ``buffer_count`` pieces are under way. ``ratio`` is the share of the trainable elements that is
    offloaded; "auto" keeps on the device what fits there. ``moments`` is what the optimizer's
    moments are stored in: int8 takes a scale for every 256 numbers beside them.
    ``update_in_backward`` starts a unit's update when its gradient has landed, where neither
    clipping nor fp16 forbids it; only ``step`` may then follow the last backward of a window, for
    nothing can take it back. ``cores`` is the share of this rank's cores that updates.
    ``pin_memory`` None pins where there is a GPU.
    """

    device: OffloadDevice = "none"
    nvme_path: tuple[str, ...] = ()
    pin_memory: bool | None = None
    buffer_count: int = 4
    buffer_size: int = 16_777_216
    pipeline_read: bool = True
    pipeline_write: bool = True
    ratio: float | Literal["auto"] = 1.0
    moments: Moments = "fp32"
    update_in_backward: bool = False
    cores: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvme_path", _paths(self.nvme_path))

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device != "none"


@dataclass(frozen=True)
class OffloadParam:
    """Where the chunks of the parameters live at stage 3; see arXiv 2104.07857.

    "cpu" is memory of the host. "nvme" is files under ``nvme_path``, but for the first
    ``max_in_cpu`` elements of this rank, which stay in memory; ``buffer_count`` units are under
    way. ``buffer_size`` has no effect: a unit's shard is read whole.
    """

    device: OffloadDevice = "none"
    nvme_path: tuple[str, ...] = ()
    pin_memory: bool | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvme_path", _paths(self.nvme_path))

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.device != "none"


@dataclass(frozen=True)
class AioSection:
    """How files are read and written: requests of ``block_size`` bytes, at most ``queue_depth`` of
    them under way; by io_uring, or by ``threads`` where the kernel refuses that.
    """

    block_size: int = 1_048_576
    queue_depth: int = 32
    threads: int = 8


def _paths(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def settle(reading: Reading) -> None:
    """Fill in what one key of offload says about another, in place: 16-bit optimizer states are
    bf16 moments.
    """
    if MOMENTS in reading.filled:
        reading.discard(MOMENTS)
    if reading.values.get(BF16_STATES) and MOMENTS not in reading.values:
        reading.fill(MOMENTS, "bf16", f"computed: {BF16_STATES}")


def check(reading: Reading) -> None:
    """Note in ``reading`` sections of offload that contradict each other or the stage.

    What rests on a key that is not there is noted only where all else is right: a misspelt key may
    have been meant.
    """
    values, sources, complete = reading.values, reading.sources, not reading.mistakes
    for section in (OPTIMIZER, PARAM):
        path = f"{section}.nvme_path"
        if (
            complete
            and values.get(f"{section}.device") == "nvme"
            and not values.get(path)
            and path not in reading.autos
        ):
            reading.mistakes.append(
                ConfigError(
                    f"{section}.device = 'nvme' ({sources[f'{section}.device']}) names no folder "
                    f"for its files; write {path}: a folder on "
                    "a local NVMe disk, or a list of folders, one a disk"
                )
            )
    stage, device = values.get(STAGE, 0), values.get(f"{PARAM}.device", "none")
    if device != "none" and stage != 3 and (complete or STAGE in values):
        reading.mistakes.append(
            ConfigError(
                f"{PARAM}.device = {device!r} ({sources[f'{PARAM}.device']}) needs "
                f"{STAGE} = 3, not {stage} "
                f"({sources.get(STAGE, 'default')}): below it every rank computes with whole "
                "parameters; write stage: 3, or offload the "
                f"optimizer alone ({OPTIMIZER}.device)"
            )
        )
    if not values.get(BF16_STATES):
        return
    if (
        values.get(f"{OPTIMIZER}.device", "none") == "none"
        and f"{OPTIMIZER}.device" not in reading.autos
    ):
        if complete or f"{OPTIMIZER}.device" in values:
            reading.mistakes.append(
                NotBuiltError(
                    f"{BF16_STATES} = True ({sources[BF16_STATES]}) asks for optimizer states in "
                    "bf16 on the device, which this version of "
                    "hf-zero does not provide; remove the key or write false, or offload the "
                    f"optimizer ({OPTIMIZER}.device: cpu), where "
                    "moments may be bf16"
                )
            )
    elif values.get(MOMENTS) != "bf16":
        reading.mistakes.append(
            ConfigError(
                f"{MOMENTS} = {values.get(MOMENTS)!r} ({sources[MOMENTS]}) contradicts "
                f"{BF16_STATES} = True ({sources[BF16_STATES]}); "
                "remove one of them"
            )
        )
