"""All fields of a ZeroConfig: keys, and the sections that hold further keys."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING

from hf_zero.config.feature_rows import SECTIONS
from hf_zero.config.kernels import KERNELS
from hf_zero.config.offload import AioSection, OffloadOptimizer, OffloadParam
from hf_zero.config.sections import (
    EXPERT_PARALLEL,
    TENSOR,
    AutocastSection,
    Bf16Section,
    CheckpointSection,
    ExpertParallelSection,
    Fp16Section,
    NcclSection,
    OptimizerConfig,
    PipelineSection,
    SchedulerConfig,
    TensorParallelSection,
    ZeroSection,
)
from hf_zero.config.value_types import (
    BOOLEAN,
    COUNT,
    DTYPE,
    INTERVAL,
    NAMES,
    SECONDS_OR_OFF,
    SECTION,
    TEXT,
    choice,
    integer,
    key,
    number,
    section,
)
from hf_zero.logging import JsonObject

ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "efficient", "math")
# seconds: clocks that count nanoseconds since 1970 end in 2262
LONGEST_WAIT = 1e9


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """The values of a configuration; see :class:`hf_zero.config.ZeroConfig`."""

    stage: int = key(integer(0, 3), 0, name="zero_optimization.stage", required=True)
    train_batch_size: int | None = key(integer(1), None, unit="samples")
    train_micro_batch_size_per_gpu: int | None = key(integer(1), None, unit="samples")
    gradient_accumulation_steps: int | None = key(integer(1), None, unit="micro-batches")
    managed_gradient_accumulation: bool = key(BOOLEAN, True)
    elasticity: JsonObject | None = key(SECTION, None, hash=False)
    gradient_clipping: float = key(number(0), 0.0)
    zero: ZeroSection = section("zero_optimization", ZeroSection)
    fp16: Fp16Section = section("fp16", Fp16Section)
    bf16: Bf16Section = section("bf16", Bf16Section)
    torch_autocast: AutocastSection = section("torch_autocast", AutocastSection)
    optimizer: OptimizerConfig | None = section("optimizer", OptimizerConfig)
    scheduler: SchedulerConfig | None = section("scheduler", SchedulerConfig)
    prescale_gradients: bool = key(BOOLEAN, False)
    gradient_predivide_factor: float = key(number(above=0), 1.0)
    gradient_allreduce_op: str = key(choice("mean", "sum"), "mean")
    communication_data_type: str | None = key(DTYPE, None)
    gradient_accumulation_dtype: str | None = key(DTYPE, None, name="data_types.grad_accum_dtype")
    buffer_dtype: str | None = key(DTYPE, None, name="data_types.buffer_dtype")
    keep_in_fp32_modules: tuple[str, ...] = key(NAMES, (), name="data_types.keep_in_fp32_modules")
    elementwise_optimizers: tuple[str, ...] = key(NAMES, ())
    allow_untested_optimizer: bool = key(BOOLEAN, False, name="zero_allow_untested_optimizer")
    tensor_parallel: TensorParallelSection = section(TENSOR, TensorParallelSection)
    sequence_parallel_size: int = key(integer(1), 1, unit="ranks")
    context_parallel_size: int = key(integer(1), 1, unit="ranks")
    pipeline: PipelineSection = section("pipeline", PipelineSection)
    expert_parallel: ExpertParallelSection = section(EXPERT_PARALLEL, ExpertParallelSection)
    replicate_size: int = key(integer(1), 1)
    timeout: float = key(number(above=0, high=LONGEST_WAIT), 1800.0, unit="seconds")
    host_timeout: float = key(SECONDS_OR_OFF, 15.0, unit="seconds")
    distributed_backend: str | None = key(choice("gloo", "nccl"), None)
    distributed_port: int | None = key(integer(1, 65535), None)
    distributed_interface: str | None = key(TEXT, None)
    nccl: NcclSection = section("nccl", NcclSection)
    seed: int | None = key(COUNT, None)
    kernels: str | tuple[str, ...] = key(KERNELS, "off")
    sparse_attention: JsonObject | None = key(SECTION, None, hash=False)
    pre_layer_norm: bool = key(BOOLEAN, False)
    attention_backend: str = key(choice(*ATTENTION_BACKENDS), "auto")
    offload_optimizer: OffloadOptimizer = section(
        "zero_optimization.offload_optimizer", OffloadOptimizer
    )
    offload_param: OffloadParam = section("zero_optimization.offload_param", OffloadParam)
    aio: AioSection = section("aio", AioSection)
    checkpoint: CheckpointSection = section("checkpoint", CheckpointSection)
    wall_clock_breakdown: bool = key(BOOLEAN, False)
    steps_per_print: float | None = key(INTERVAL, None, unit="steps")
    memory_breakdown: bool = key(BOOLEAN, False)
    dump_state: bool = key(BOOLEAN, False)
    log_level: str | None = key(choice("debug", "info", "warning", "error", "critical"), None)
    dataloader_drop_last: bool = key(BOOLEAN, False)


if TYPE_CHECKING:
    Settings = CoreSettings
else:
    Settings = make_dataclass(
        "Settings",
        [(each.FIELD, each, section(each.SECTION_PATH, each)) for each in SECTIONS],
        bases=(CoreSettings,),
        frozen=True,
        kw_only=True,
    )
