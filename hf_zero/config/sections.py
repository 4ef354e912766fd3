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

_MESSAGE = "hf-zero sends each unit, usually one block, as one message"

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
        "number of elements to gather ahead of their use",
        name="stage3_prefetch_bucket_size",
        unit="elements",
    )
    gather_16bit_weights_on_model_save: bool = key(
        BOOLEAN,
        False,
        "write whole weights into the Trainer's checkpoints, too; saves that a script "
        "requests always have them",
        name="stage3_gather_16bit_weights_on_model_save",
    )
    max_live_parameters: int | None = key(
        SIZE,
        None,
        "the largest number of elements that generate keeps whole; null means half of the "
        "free memory",
        name="stage3_max_live_parameters",
        unit="elements",
    )
    param_persistence_threshold: int | None = key(
        SIZE,
        None,
        "parameters of at most this many elements stay whole between steps at stage 3, "
        "and their optimizer state stays on the device; 0 shards all; null means 100000, "
        "DeepSpeed's default",
        name="stage3_param_persistence_threshold",
        unit="elements",
    )
    model_persistence_threshold: int | None = key(
        SIZE,
        None,
        "the largest total number of elements in parameters that stay whole between "
        "steps; null means no limit",
        name="stage3_model_persistence_threshold",
        unit="elements",
    )
    keep_step_buffers: bool = key(
        BOOLEAN,
        False,
        "keep the memory of gradients, and of their messages, between steps; otherwise it is "
        "freed after each step and allocated by the next backward",
    )
    keep_parameter_shards: bool = key(
        BOOLEAN,
        False,
        "at stage 3, keep parameter shards in 16 bits beside the master weights in fp32 on the "
        "device; otherwise a gather casts the master weights, which takes 2 bytes less for each "
        "parameter of this rank",
    )
    release_frozen_state: bool = key(
        BOOLEAN,
        False,
        "drop the master weights and the optimizer state of parameters that were frozen since, "
        "whenever others are unfrozen, added or replaced; otherwise frozen ones keep them",
    )
    mics_shard_size: int = key(
        integer(-1),
        -1,
        "number of ranks that share one copy of the shards (MiCS); -1 means all ranks",
        unit="ranks",
    )
    hierarchical_gather: bool = key(
        BOOLEAN,
        False,
        "if the ranks that share a copy are on several hosts, gather weights at stage 3 "
        "in two hops: each chunk is sent to a host once, and then gathered within the "
        "host",
        name="mics_hierarchical_params_gather",
    )
    hpz_partition_size: int = key(
        integer(0),
        1,
        "number of ranks on a host that keep a second set of shards of a forward's "
        "weights at stage 3, so that the backward gathers only within the host (ZeRO++ "
        "hpZ); 0 or 1 disables it",
        name="zero_hpz_partition_size",
        unit="ranks",
    )
    overlap_comm: bool | None = key(
        BOOLEAN,
        row=inert("overlap_comm", BOOLEAN, "gathers and reductions always overlap computation"),
    )
    reduce_bucket_size: int | None = key(SIZE, row=inert("reduce_bucket_size", SIZE, _MESSAGE))
    allgather_bucket_size: int | None = key(
        SIZE, row=inert("allgather_bucket_size", SIZE, _MESSAGE)
    )
    round_robin_gradients: bool | None = key(
        BOOLEAN,
        row=inert(
            "round_robin_gradients",
            BOOLEAN,
            "it concerns DeepSpeed's copies of gradients to the CPU",
        ),
    )
    quantized_gradients: bool = key(
        BOOLEAN,
        False,
        "send gradients as int4 blocks of 64 elements with a scale each, at stages 1 to 3 "
        "(ZeRO++ qgZ); each gradient is rounded once, and sums are in fp32",
        name="zero_quantized_gradients",
    )
    quantized_weights: bool = key(
        BOOLEAN,
        False,
        "gather weights as int8 blocks of 256 elements with a scale each, at stage 3 "
        "(ZeRO++ qwZ); the shards keep their precision",
        name="zero_quantized_weights",
    )
    quantized_nontrainable_weights: bool = key(
        BOOLEAN,
        False,
        "like zero_quantized_weights, but only for frozen weights",
        name="zero_quantized_nontrainable_weights",
    )
    leaf_module: dict[str, Any] | None = key(
        SECTION,
        None,
        "modules that the engine gathers as one unit: lists of classes, names or name_suffixes",
        hash=False,
    )
    ignore_unused_parameters: bool = key(
        BOOLEAN,
        True,
        "true leaves parameters unchanged that no rank has used; false raises an error in "
        "a step if a parameter has no gradient",
    )
    module_granularity_threshold: int | None = key(
        SIZE,
        None,
        "consecutive blocks with at most this many elements in total form one unit, at "
        "every stage; 0 disables this; null means 65536",
        name="stage3_module_granularity_threshold",
        unit="elements",
    )


@dataclass(frozen=True)
class LocoSection:
    """LoCo error feedback for quantized gradients; off if both fields are None."""

    err_beta: float | None = key(
        number(0, 1),
        None,
        "LoCo adds the rounding errors of compressed gradients to later ones; err_beta is "
        "the share of the earlier error that remains (0.8 if only reset_T is set)",
    )
    reset_steps: int | None = key(
        integer(1),
        None,
        "number of steps after which LoCo clears the errors; it also clears them when "
        "gradients overflow (1024 if only err_beta is set)",
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
        "4 sends gradients, and the differences between new and current weights, as int4 "
        "blocks with a scale each, at stages 1 and 2; 1 sends Adam's momentum in one bit "
        "after freeze_step, as OneBitAdam does, at stage 1; null sends everything "
        "uncompressed",
        unit="bits",
    )
    freeze_step: int | None = key(
        integer(1),
        None,
        "with 1 bit, the last step that compresses nothing and updates the variance",
        unit="steps",
    )
    block_size: int | None = key(
        one_of(32, 64, 128, 256, 512, 1024, 2048),
        None,
        "number of elements that share a scale in compressed messages; null means 64 with "
        "4 bits, 256 with 8 and 2048 with 1; 2048 is only allowed with 1 bit",
        unit="elements",
    )


@dataclass(frozen=True)
class Fp16Section:
    """Training in float16 with a loss scale: dynamic if ``loss_scale`` is 0, else that constant."""

    enabled: bool = key(BOOLEAN, False, "train in float16 with a loss scale")
    auto_cast: bool = key(BOOLEAN, False, "cast floating-point inputs to fp16")
    loss_scale: float = key(number(0), 0.0, "a constant loss scale; 0 uses a dynamic one")
    initial_scale_power: int = key(COUNT, 16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: int = key(
        integer(1),
        1000,
        "number of steps without overflow before the scale doubles; the first step of a "
        "run and the first after an overflow do not count",
        unit="steps",
    )
    hysteresis: int = key(integer(1), 2, "number of overflows before the scale halves")
    consecutive_hysteresis: bool = key(
        BOOLEAN, False, "a step without overflow resets the hysteresis"
    )
    min_loss_scale: float = key(number(above=0), 1.0, "the smallest dynamic scale")


@dataclass(frozen=True)
class Bf16Section:
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = key(BOOLEAN, False, "train in bfloat16 with fp32 master weights")
    check_grad_overflow: bool = key(
        BOOLEAN,
        False,
        "skip a step whose gradients are not finite, at any stage, which needs one wait "
        "for the device per step; false only warns one step later (DeepSpeed's default is "
        "true)",
        idle=without("bf16.enabled"),
    )


@dataclass(frozen=True)
class AutocastSection:
    """``torch.autocast`` around the engine's forward; parameters keep their dtype."""

    enabled: bool = key(BOOLEAN, False, "run the engine's forward under torch.autocast")
    dtype: str = key(DTYPE, "bf16", "the dtype in which autocast computes")


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
        SECTION, None, "the keyword arguments of that class", default_factory=dict, hash=False
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
        SECTION, None, "the keyword arguments of that class", default_factory=dict, hash=False
    )


@dataclass(frozen=True)
class CheckpointSection:
    """Writing and reading of checkpoints. ``async_save`` writes from a copy in host memory while
    training continues; ``folder`` is that of the run; ``keep`` is the number of checkpoints with
    automatic tags that stay in a folder, None for all.
    """

    use_node_local_storage: bool = key(
        BOOLEAN, False, "the hosts have no shared file system; without effect on a single machine"
    )
    async_save: bool = key(
        BOOLEAN,
        False,
        "copy checkpoints to host memory, and write them while training continues",
    )
    folder: str | None = key(
        TEXT,
        None,
        "the folder or URL that save_checkpoint(), load_checkpoint() and "
        "initialize(resume='latest') use if you pass none",
    )
    keep: int | None = key(
        integer(1),
        None,
        "number of checkpoints named global_step<N> to keep in a folder; null keeps all; "
        "for other tags use save_checkpoint(keep=…)",
        unit="checkpoints",
    )
    verify: bool = key(
        BOOLEAN, True, "compare the data with the hashes in the manifest while loading"
    )
    save_on_signal: bool = key(
        BOOLEAN,
        True,
        "in the Trainer and in Lightning: save and end on SIGTERM, and on SIGUSR1 unless something "
        "handles it; a loop calls engine.stop_on()",
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
        "number of steps between two checkpoints in the memory of the hosts, which "
        "survive the processes; null makes none",
        unit="steps",
    )
    copies: int = key(
        integer(1),
        2,
        "number of hosts that hold each part of such a checkpoint; with 2, a checkpoint "
        "survives the loss of one host",
        unit="hosts",
        idle=_without_memory,
    )
    limit: int | None = key(
        BYTES,
        None,
        "the limit of memory for such checkpoints on a host, such as 40GiB; null uses all "
        "free memory",
        unit="bytes",
        idle=_without_memory,
    )
    folder: str | None = key(
        PATH,
        None,
        "the folder for such checkpoints on each host; null uses /dev/shm, or the folder "
        "for temporary files if there is no tmpfs",
        idle=_without_memory,
    )
    job: str | None = key(
        TEXT,
        None,
        "a unique name of the job that stays the same when it restarts; null uses SLURM's "
        "job id, torchrun's run id, or the launcher's process id",
        idle=_without_memory,
    )


_UNCOMPILED = without("compile.blocks")


@dataclass(frozen=True)
class CompileSection:
    """torch.compile for the forwards of blocks; see :mod:`hf_zero.activations.compile`."""

    blocks: bool = key(
        BOOLEAN,
        False,
        "compile the forward of each block with torch.compile; compile: blocks is the short form",
    )
    # CUDA graphs fix the addresses of weights; gathers at stage 3 and checkpoints do not.
    mode: str = key(
        choice("default", "max-autotune-no-cudagraphs"),
        "default",
        "the mode of torch.compile",
        idle=_UNCOMPILED,
    )
    dynamic: bool | None = key(
        BOOLEAN,
        None,
        "null compiles one graph for the first shapes and a dynamic graph for all others; "
        "false compiles a graph for each shape; true compiles one dynamic graph",
        idle=_UNCOMPILED,
    )
    backend: str = key(TEXT, "inductor", "the backend of torch.compile", idle=_UNCOMPILED)


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
