"""The sections of a ZeroConfig: small frozen dataclasses whose fields declare its keys, which
``keys.toml`` explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_zero.config.optimizers import NAMED
from hf_zero.config.value_types import (
    BOOLEAN,
    BYTES,
    COUNT,
    DTYPE,
    SECTION,
    SIZE,
    TEXT,
    choice,
    integer,
    key,
    named,
    number,
    without,
)
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject

# Names that hf_zero.optim builds: the classes load torch, which no configuration does.
OPTIMIZERS = tuple(sorted(NAMED))
SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
    "ExponentialLR", "LRRangeTest", "LinearLR", "MultiStepLR", "OneCycle", "OneCycleLR",
    "PolynomialLR", "StepLR", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
)  # fmt: skip

UPDATE_IN_BACKWARD = "zero_optimization.update_in_backward"


def awaited_by_updates(
    clips: object, is_fp16: object, checks_overflow: object, refuses_unused: object
) -> str:
    """Return which number an update of all parameters must await until the backward has ended, as a
    sentence; "" if none.
    """
    numbers = {
        "the norm that gradient_clipping needs is": clips,
        "whether fp16 gradients overflowed is": is_fp16,
        "whether gradients are finite is": checks_overflow,
        "whether parameters are unused is": refuses_unused,
    }
    awaited = (what for what, is_needed in numbers.items() if is_needed)
    return next((f"{what} known when backward has ended" for what in awaited), "")


def _idle_in_backward(values: Mapping[str, object]) -> str:
    if not values.get(UPDATE_IN_BACKWARD):
        return ""
    return awaited_by_updates(
        values.get("gradient_clipping"),
        values.get("fp16.enabled"),
        values.get("bf16.check_grad_overflow"),
        values.get("zero_optimization.ignore_unused_parameters") is False,
    )


@dataclass(frozen=True)
class ZeroSection:
    """Sharding, gathering and reduction of ``zero_optimization``; sizes in elements. None: not
    written.

    ``update_in_backward`` updates a unit as soon as its gradients are reduced, and frees them,
    unless clipping, fp16 or an optimizer of whole tensors prevents it. The last backward of a
    window then makes its step, which ``step`` confirms.
    """

    prefetch_bucket_size: int = key(
        SIZE, 50_000_000, name="stage3_prefetch_bucket_size", unit="elements"
    )
    gather_16bit_weights_on_model_save: bool = key(
        BOOLEAN, False, name="stage3_gather_16bit_weights_on_model_save"
    )
    max_live_parameters: int | None = key(
        SIZE, None, name="stage3_max_live_parameters", unit="elements"
    )
    param_persistence_threshold: int | None = key(
        SIZE, None, name="stage3_param_persistence_threshold", unit="elements"
    )
    model_persistence_threshold: int | None = key(
        SIZE, None, name="stage3_model_persistence_threshold", unit="elements"
    )
    keep_step_buffers: bool = key(BOOLEAN, False)
    keep_parameter_shards: bool = key(BOOLEAN, False)
    release_frozen_state: bool = key(BOOLEAN, False)
    mics_shard_size: int = key(integer(-1), -1, unit="ranks")
    hierarchical_gather: bool = key(BOOLEAN, False, name="mics_hierarchical_params_gather")
    hpz_partition_size: int = key(integer(0), 1, name="zero_hpz_partition_size", unit="ranks")
    overlap_comm: bool | None = key(BOOLEAN)
    reduce_bucket_size: int | None = key(SIZE)
    allgather_bucket_size: int | None = key(SIZE)
    round_robin_gradients: bool | None = key(BOOLEAN)
    quantized_gradients: bool = key(BOOLEAN, False, name="zero_quantized_gradients")
    quantized_weights: bool = key(BOOLEAN, False, name="zero_quantized_weights")
    quantized_nontrainable_weights: bool = key(
        BOOLEAN, False, name="zero_quantized_nontrainable_weights"
    )
    leaf_module: JsonObject | None = key(SECTION, None, hash=False)
    ignore_unused_parameters: bool = key(BOOLEAN, True)
    update_in_backward: bool = key(BOOLEAN, False, idle=_idle_in_backward)
    module_granularity_threshold: int | None = key(
        SIZE, None, name="stage3_module_granularity_threshold", unit="elements"
    )


@dataclass(frozen=True)
class Fp16Section:
    """Training in float16 with a loss scale: dynamic if ``loss_scale`` is 0, else that constant."""

    enabled: bool = key(BOOLEAN, False)
    auto_cast: bool = key(BOOLEAN, False)
    loss_scale: float = key(number(0), 0.0)
    initial_scale_power: int = key(COUNT, 16)
    loss_scale_window: int = key(integer(1), 1000, unit="steps")
    hysteresis: int = key(integer(1), 2)
    consecutive_hysteresis: bool = key(BOOLEAN, False)
    min_loss_scale: float = key(number(above=0), 1.0)


def _on_gloo(values: Mapping[str, object]) -> str:
    gloo = values.get("distributed_backend") == "gloo"
    return "distributed_backend is gloo, and the keys are NCCL's" if gloo else ""


@dataclass(frozen=True)
class NcclSection:
    """Fields of NCCL's configuration of a communicator; None: NCCL chooses."""

    min_ctas: int | None = key(integer(1), None, idle=_on_gloo)
    max_ctas: int | None = key(integer(1), None, idle=_on_gloo)
    cta_policy: str | None = key(choice("default", "efficiency", "zero"), None, idle=_on_gloo)

    @property
    def written(self) -> dict[str, int | str]:
        """The fields that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _without_bf16_state(values: Mapping[str, object]) -> str:
    keys = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
    rounds = values.get("bf16.enabled") and any(values.get(key) for key in keys)
    return "" if rounds else f"neither {keys[0]} nor {keys[1]} is on"


@dataclass(frozen=True)
class Bf16Section:
    """Training in bfloat16, with master weights and moments in fp32 or in bf16."""

    enabled: bool = key(BOOLEAN, False)
    check_grad_overflow: bool = key(BOOLEAN, False, idle=without("bf16.enabled"))
    bf16_master_weights_and_grads: bool = key(BOOLEAN, False, idle=without("bf16.enabled"))
    bf16_optimizer_states: bool = key(BOOLEAN, False, idle=without("bf16.enabled"))
    kahan_summation: bool = key(
        BOOLEAN, False, idle=without("bf16.bf16_master_weights_and_grads", "bf16.enabled")
    )
    stochastic_rounding_seed: int = key(COUNT, 0, idle=_without_bf16_state)


@dataclass(frozen=True)
class AutocastSection:
    """``torch.autocast`` around the engine's forward; parameters keep their dtype."""

    enabled: bool = key(BOOLEAN, False)
    dtype: str = key(DTYPE, "bf16")


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name; ``params`` are its keyword arguments."""

    type: str = key(named(*OPTIMIZERS), None, required=True)
    params: JsonObject = key(SECTION, None, default_factory=dict, hash=False)


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate schedule by name; ``params`` are its keyword arguments."""

    type: str = key(named(*SCHEDULERS), None, required=True)
    params: JsonObject = key(SECTION, None, default_factory=dict, hash=False)


@dataclass(frozen=True)
class CheckpointSection:
    """Writing and reading of checkpoints. ``async_save`` writes from a copy in host memory while
    training continues, which ``keep_staging`` keeps between saves and which has at most
    ``staging_bytes``, None for all of the file; ``folder`` is that of the run; ``keep`` is the
    number of checkpoints with automatic tags that stay in a folder, None for all.
    """

    use_node_local_storage: bool = key(BOOLEAN, False)
    async_save: bool = key(BOOLEAN, False)
    keep_staging: bool = key(BOOLEAN, False)
    staging_bytes: int | None = key(BYTES, None, unit="bytes")
    folder: str | None = key(TEXT, None)
    keep: int | None = key(integer(1), None, unit="checkpoints")
    verify: bool = key(BOOLEAN, True)
    save_on_signal: bool = key(BOOLEAN, True)


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


TENSOR = "tensor_parallel"
TENSOR_SIZE = f"{TENSOR}.autotp_size"
VERIFY = f"{TENSOR}.verify"


@dataclass(frozen=True)
class TensorParallelSection:
    """Tensor parallelism (arXiv 1909.08053): neighboring ranks read the same batches and hold
    parts of every matrix, by the plan of the model; see :mod:`hf_zero.parallel.tensor`.
    """

    autotp_size: int = key(COUNT, 0, unit="ranks")
    verify: bool = key(BOOLEAN, False)

    @property
    def size(self) -> int:
        """The number of tensor-parallel ranks; 1 without tensor parallelism."""
        return max(self.autotp_size, 1)


TENSOR_ALIASES = {f"{TENSOR}.tp.tp_size": TENSOR_SIZE}


EXPERT_PARALLEL = "expert_parallel"
AUTOEP_SIZE = f"{EXPERT_PARALLEL}.autoep_size"


@dataclass(frozen=True)
class ExpertParallelSection:
    """Expert parallelism for models of transformers: data-parallel ranks hold different experts and
    exchange their tokens; see :mod:`hf_zero.parallel.expert`.
    """

    enabled: bool = key(BOOLEAN, False)
    autoep_size: int = key(integer(1), 1, unit="ranks", idle=without(f"{EXPERT_PARALLEL}.enabled"))

    @property
    def size(self) -> int:
        """The number of ranks that hold one set of the experts; 1: no expert parallelism."""
        return self.autoep_size if self.enabled else 1


PIPELINE = "pipeline"
INTERLEAVED = "interleaved_1f1b"
SCHEDULES = ("1f1b", "gpipe", INTERLEAVED)


@dataclass(frozen=True)
class PipelineSection:
    """Schedule and recomputation of a ``PipelineModule``; see :mod:`hf_zero.parallel.pipeline`."""

    schedule: str | None = key(choice(*SCHEDULES), None)
    activation_checkpoint_interval: int = key(integer(0), 0, unit="layers")

    def schedule_for(self, stages_per_rank: int) -> str:
        """Return the schedule for ranks with ``stages_per_rank`` stages each. Raises ConfigError if
        the written schedule does not support that number.
        """
        if self.schedule is None:
            return INTERLEAVED if stages_per_rank > 1 else "1f1b"
        if (self.schedule == INTERLEAVED) != (stages_per_rank > 1):
            raise ConfigError(
                f"{PIPELINE}.schedule is {self.schedule!r} with stages_per_rank={stages_per_rank}; "
                f'"{INTERLEAVED}" is for ranks with several stages, the others for one: change '
                "one of them, or remove the key"
            )
        return self.schedule
