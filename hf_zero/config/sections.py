"""The sections of a ZeroConfig: small frozen dataclasses whose fields declare its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import (
    BOOLEAN,
    BYTES,
    COUNT,
    DTYPE,
    PATH,
    SECTION,
    SIZE,
    TEXT,
    choice,
    integer,
    named,
    number,
    one_of,
)
from hf_zero.config.rows import inert, key, without

_MESSAGE = "a unit is one message"

# Names that hf_zero.optim builds: their classes load torch, which no configuration does.
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "CPUAdagrad",
    "CPUAdam", "CPULion", "CPUSGD", "DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam",
    "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion", "LARS", "Lamb", "Lion",
    "Muon", "NAdam", "OneBitAdam", "OneBitLamb", "RAdam", "RMSprop", "Rprop", "SGD",
    "ZeroOneAdam",
)  # fmt: skip
SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
    "ExponentialLR", "LRRangeTest", "LinearLR", "MultiStepLR", "OneCycle", "OneCycleLR",
    "PolynomialLR", "StepLR", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
)  # fmt: skip

SECRETS = frozenset(("comet.api_key",))
"""Keys whose values are not shown."""


@dataclass(frozen=True)
class ZeroSection:
    """Sharding, gathering and reduction of ``zero_optimization``; sizes in elements. None: not
    written.
    """

    prefetch_bucket_size: int = key(
        SIZE,
        50_000_000,
        "elements gathered ahead of their use",
        name="stage3_prefetch_bucket_size",
        unit="elements",
    )
    gather_16bit_weights_on_model_save: bool = key(
        BOOLEAN,
        False,
        "whole weights in checkpoints of the Trainer, too; a save that a script asks for has them",
        name="stage3_gather_16bit_weights_on_model_save",
    )
    max_live_parameters: int | None = key(
        SIZE,
        None,
        "most parameters that generate keeps whole; null: half the free memory",
        name="stage3_max_live_parameters",
        unit="elements",
    )
    param_persistence_threshold: int | None = key(
        SIZE,
        None,
        "parameters of at most so many elements stay whole between steps at stage 3, and the "
        "optimizer's state of them on the device; 0: none; null: 100000, DeepSpeed's default",
        name="stage3_param_persistence_threshold",
        unit="elements",
    )
    model_persistence_threshold: int | None = key(
        SIZE,
        None,
        "such parameters stay whole as long as they have at most so many elements together; "
        "null: any number",
        name="stage3_model_persistence_threshold",
        unit="elements",
    )
    mics_shard_size: int = key(
        integer(-1), -1, "ranks that share one copy (MiCS); -1: all", unit="ranks"
    )
    hierarchical_gather: bool = key(
        BOOLEAN,
        False,
        "where the ranks of one copy are of several hosts, weights at stage 3 are gathered in two "
        "hops: across the hosts, each chunk once for a host, then within each",
        name="mics_hierarchical_params_gather",
    )
    hpz_partition_size: int = key(
        integer(0),
        1,
        "ranks of a node among which the weights of a forward at stage 3 are kept sharded a second "
        "time, for the gathers of its backward (ZeRO++ hpZ); 0, 1: not",
        name="zero_hpz_partition_size",
        unit="ranks",
    )
    overlap_comm: bool | None = key(
        BOOLEAN,
        row=inert("overlap_comm", BOOLEAN, "gathers and reductions are always asynchronous"),
    )
    reduce_bucket_size: int | None = key(SIZE, row=inert("reduce_bucket_size", SIZE, _MESSAGE))
    allgather_bucket_size: int | None = key(
        SIZE, row=inert("allgather_bucket_size", SIZE, _MESSAGE)
    )
    round_robin_gradients: bool | None = key(
        BOOLEAN,
        row=inert("round_robin_gradients", BOOLEAN, "concerns copies of gradients to the CPU"),
    )
    quantized_gradients: bool = key(
        BOOLEAN,
        False,
        "gradients travel as int4 blocks of 64 elements with a scale each, at stages 1 to 3 "
        "(ZeRO++ qgZ); each is rounded once, sums are in fp32",
        name="zero_quantized_gradients",
    )
    quantized_weights: bool = key(
        BOOLEAN,
        False,
        "weights are gathered as int8 blocks of 256 elements with a scale each at stage 3 (ZeRO++ "
        "qwZ); the shards keep their precision",
        name="zero_quantized_weights",
    )
    quantized_nontrainable_weights: bool = key(
        BOOLEAN,
        False,
        "as zero_quantized_weights, of frozen weights alone",
        name="zero_quantized_nontrainable_weights",
    )
    leaf_module: dict[str, Any] | None = key(
        SECTION,
        None,
        "modules that are gathered whole: lists of classes, names or name_suffixes",
        hash=False,
    )
    ignore_unused_parameters: bool = key(
        BOOLEAN,
        True,
        "true: what no rank has used stays as it is; false: a step raises where a parameter "
        "has no gradient",
    )
    module_granularity_threshold: int | None = key(
        SIZE,
        None,
        "consecutive blocks with so few elements together are one unit, at every stage; "
        "0: never; null: 65536",
        name="stage3_module_granularity_threshold",
        unit="elements",
    )


@dataclass(frozen=True)
class LocoSection:
    """LoCo error feedback for quantized gradients; off if both fields are None."""

    err_beta: float | None = key(
        number(0, 1),
        None,
        "LoCo: what gradients lose in few bits is added to later ones; of the error so far so "
        "much stays (0.8 where reset_T alone is written)",
    )
    reset_steps: int | None = key(
        integer(1),
        None,
        "LoCo: errors are cleared after so many steps, and where gradients overflow (1024 where "
        "err_beta alone is written)",
        name="reset_T",
        unit="steps",
    )

    @property
    def on(self) -> bool:
        """Whether quantization errors are kept."""
        return self.err_beta is not None or self.reset_steps is not None

    @property
    def beta(self) -> float:
        return 0.8 if self.err_beta is None else self.err_beta

    @property
    def every(self) -> int:
        """The number of steps between two resets of the errors."""
        return self.reset_steps or 1024


@dataclass(frozen=True)
class CompressedCommunication:
    """Low-bit gradients and updates at stages 1 and 2; ``bits`` None: uncompressed."""

    bits: int | None = key(
        one_of(4, 1),
        None,
        "4: gradients travel as int4 blocks with a scale each, updates as int4 blocks of "
        "differences to the weights that all ranks have; stages 1 and 2. 1: after freeze_step the "
        "momentum of Adam travels both ways, as in OneBitAdam; stage 1. null: uncompressed",
        unit="bits",
    )
    freeze_step: int | None = key(
        integer(1),
        None,
        "with 1 bit: the last step in which nothing is compressed and the variance changes",
        unit="steps",
    )
    block_size: int | None = key(
        one_of(32, 64, 128, 256, 512, 1024, 2048),
        None,
        "elements that share a scale, in all that is compressed; null: 64 in 4 bits, 256 in 8, "
        "2048 in one; "
        "2048 with 1 bit alone",
        unit="elements",
    )


@dataclass(frozen=True)
class Fp16Section:
    """Training in float16 with a loss scale: dynamic if ``loss_scale`` is 0, else that constant."""

    enabled: bool = key(BOOLEAN, False, "train in float16 with a loss scale")
    auto_cast: bool = key(BOOLEAN, False, "cast floating-point inputs")
    loss_scale: float = key(number(0), 0.0, "a constant; 0: dynamic")
    initial_scale_power: int = key(COUNT, 16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: int = key(
        integer(1),
        1000,
        "good steps before the scale doubles; the first of a run and the first after an overflow "
        "do not count",
        unit="steps",
    )
    hysteresis: int = key(integer(1), 2, "overflows before the scale halves")
    consecutive_hysteresis: bool = key(BOOLEAN, False, "a good step restores the hysteresis")
    min_loss_scale: float = key(number(above=0), 1.0, "the scale never falls below")


@dataclass(frozen=True)
class Bf16Section:
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = key(BOOLEAN, False, "train in bfloat16 with fp32 master weights")
    check_grad_overflow: bool = key(
        BOOLEAN,
        False,
        "skip a step whose gradients are not finite, at any stage, for one wait for the device a "
        "step; false (DeepSpeed's default is true): a warning one step later",
        idle=without("bf16.enabled"),
    )


@dataclass(frozen=True)
class AutocastSection:
    """``torch.autocast`` around the engine's forward; parameters keep their dtype."""

    enabled: bool = key(BOOLEAN, False, "run the engine's forward under torch.autocast")
    dtype: str = key(DTYPE, "bf16", "what autocast computes in")


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name; ``params`` are its keyword arguments."""

    type: str = key(
        named(*OPTIMIZERS),
        None,
        "class of the optimizer, in any case: `hf-zero docs parameters-of-optimizers` lists them",
        required=True,
    )
    params: dict[str, Any] = key(
        SECTION, None, "keyword arguments of that class", default_factory=dict, hash=False
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate schedule by name; ``params`` are its keyword arguments."""

    type: str = key(
        named(*SCHEDULERS),
        None,
        "class of the schedule, in any case: `hf-zero docs parameters-of-schedules` lists them",
        required=True,
    )
    params: dict[str, Any] = key(
        SECTION, None, "keyword arguments of that class", default_factory=dict, hash=False
    )


@dataclass(frozen=True)
class CheckpointSection:
    """Writing and reading of checkpoints. ``async_save`` writes from a copy in host memory while
    training continues; ``folder`` is that of the run; ``keep`` is the number of checkpoints with
    automatic tags that stay in a folder, None for all.
    """

    use_node_local_storage: bool = key(
        BOOLEAN, False, "no shared file system; on one machine it changes nothing"
    )
    async_save: bool = key(
        BOOLEAN,
        False,
        "checkpoints are copied to host memory and written while training goes on",
    )
    folder: str | None = key(
        TEXT,
        None,
        "folder or URL of save_checkpoint() and load_checkpoint() without one, and of "
        "initialize(resume='latest')",
    )
    keep: int | None = key(
        integer(1),
        None,
        "checkpoints that stay in a folder, of those named global_step<N>; none: all. With "
        "tags of your own: save_checkpoint(keep=…)",
        unit="checkpoints",
    )
    verify: bool = key(
        BOOLEAN, True, "compare what a load reads with the hashes in the manifest, as it is read"
    )


def _without_memory(values: Mapping[str, Any]) -> str:
    return "" if values.get("checkpoint.memory.every") else "checkpoint.memory.every is not set"


@dataclass(frozen=True)
class MemorySection:
    """Checkpoints in the memory of hosts. ``every`` None: none are made; ``limit`` in bytes on a
    host; ``folder`` None: a tmpfs, else a local folder.
    """

    every: int | None = key(
        integer(1),
        None,
        "steps between checkpoints in the memory of the hosts, which outlive the processes; null: "
        "none are made",
        unit="steps",
    )
    copies: int = key(
        integer(1),
        2,
        "hosts that hold each part of such a checkpoint: with 2 it survives the loss of one host",
        unit="hosts",
        idle=_without_memory,
    )
    limit: int | None = key(
        BYTES,
        None,
        "most bytes that such checkpoints take on a host, as 40GiB; null: what is free",
        unit="bytes",
        idle=_without_memory,
    )
    folder: str | None = key(
        PATH,
        None,
        "folder for such checkpoints on each host; null: /dev/shm, or the folder of temporary "
        "files where there is no tmpfs",
        idle=_without_memory,
    )
    job: str | None = key(
        TEXT,
        None,
        "name of the job, which its restarts keep and no other job has; null: SLURM's job, "
        "torchrun's run id, or the launcher's process",
        idle=_without_memory,
    )


_UNCOMPILED = without("compile.blocks")


@dataclass(frozen=True)
class CompileSection:
    """torch.compile for the forwards of blocks; see :mod:`hf_zero.activations.compile`."""

    blocks: bool = key(
        BOOLEAN,
        False,
        "compile each block's forward with torch.compile; compile: blocks is short for it",
    )
    # CUDA graphs fix the addresses of weights; gathers at stage 3 and checkpoints do not.
    mode: str = key(
        choice("default", "max-autotune-no-cudagraphs"),
        "default",
        "mode of torch.compile",
        idle=_UNCOMPILED,
    )
    dynamic: bool | None = key(
        BOOLEAN,
        None,
        "null: the first shapes get a graph of their own, all others one that fits any; false: "
        "a graph for all shapes; true: one for any",
        idle=_UNCOMPILED,
    )
    backend: str = key(TEXT, "inductor", "backend of torch.compile", idle=_UNCOMPILED)


@dataclass(frozen=True)
class LaunchSection:
    """The ranks as described by an Accelerate YAML; None where it has no such key."""

    num_processes: int | None = key(
        integer(-1), None, "the number of ranks that accelerate launch starts", unit="ranks"
    )
    use_cpu: bool | None = key(BOOLEAN, None, "ranks on CPUs, over gloo")
    mixed_precision: str | None = key(
        choice("no", "fp16", "bf16", "fp8"), None, "switches fp16 or bf16 on"
    )
