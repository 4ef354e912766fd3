"""The parts of a ZeroConfig, each a small frozen dataclass; their fields are rows of the table
in :mod:`hf_zero.config.keys`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_zero.config.activations import ActivationCheckpointing, ActivationOffload
from hf_zero.config.offload import AioSection, OffloadOptimizer, OffloadParam


@dataclass(frozen=True)
class ZeroSection:
    """How shards are gathered; sizes in elements. A field that is None was not written."""

    prefetch_bucket_size: int = 50_000_000
    gather_16bit_weights_on_model_save: bool = False
    max_live_parameters: int | None = None
    mics_shard_size: int = -1
    hpz_partition_size: int = 1
    overlap_comm: bool | None = None
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    round_robin_gradients: bool | None = None
    module_granularity_threshold: int | None = None


@dataclass(frozen=True)
class Fp16Section:
    """Training in float16 with a loss scale: dynamic when ``loss_scale`` is 0, else that
    constant.
    """

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


@dataclass(frozen=True)
class Bf16Section:
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = False


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name; ``params`` are its keyword arguments."""

    type: str
    params: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate schedule by name; ``params`` are its keyword arguments."""

    type: str
    params: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class CheckpointSection:
    """How checkpoints are written. ``async_save``: from a copy in host memory, while training goes
    on; ``keep``: how many of those that the engine names itself stay in a folder, None: all.
    """

    use_node_local_storage: bool = False
    async_save: bool = False
    keep: int | None = None


@dataclass(frozen=True)
class CompileSection:
    """What torch.compile makes of the blocks' forwards; see :mod:`hf_zero.activations.compile`."""

    blocks: bool = False
    mode: str = "default"
    dynamic: bool | None = None
    backend: str = "inductor"


@dataclass(frozen=True)
class LaunchSection:
    """What an Accelerate YAML says about the ranks; None where it says nothing."""

    num_processes: int | None = None
    use_cpu: bool | None = None
    mixed_precision: str | None = None


SECTIONS: dict[str, Any] = {
    "zero": ZeroSection,
    "fp16": Fp16Section,
    "bf16": Bf16Section,
    "offload_optimizer": OffloadOptimizer,
    "offload_param": OffloadParam,
    "aio": AioSection,
    "checkpoint": CheckpointSection,
    "compile": CompileSection,
    "activation_checkpointing": ActivationCheckpointing,
    "activation_offload": ActivationOffload,
    "launch": LaunchSection,
}
NAMED: dict[str, Any] = {"optimizer": OptimizerConfig, "scheduler": SchedulerConfig}
