"""All fields of a ZeroConfig: keys, and the sections that hold further keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_zero.config.activations import (
    ActivationCheckpointing,
    ActivationOffload,
    TiledMlpSection,
)
from hf_zero.config.kinds import (
    BOOLEAN,
    COUNT,
    DTYPE,
    INTERVAL,
    KERNELS,
    NAMES,
    SECONDS_OR_OFF,
    SECTION,
    TEXT,
    choice,
    integer,
    number,
)
from hf_zero.config.measures import (
    CometSection,
    CommsLoggerSection,
    CsvSection,
    FlopsProfilerSection,
    MetricsSection,
    TensorBoardSection,
    TraceSection,
    WandbSection,
)
from hf_zero.config.offload import AioSection, OffloadOptimizer, OffloadParam
from hf_zero.config.parallelism import (
    EXPERT_PARALLEL,
    TENSOR,
    ExpertParallelSection,
    PipelineSection,
    TensorParallelSection,
)
from hf_zero.config.quantization import (
    EIGENVALUE,
    FLOAT8,
    QAT,
    QUANTIZE,
    WEIGHTS,
    EigenvalueSection,
    Float8Training,
    QuantizationAware,
    QuantizeTraining,
    WeightQuantization,
)
from hf_zero.config.rows import key, section
from hf_zero.config.sections import (
    AutocastSection,
    Bf16Section,
    CheckpointSection,
    CompileSection,
    CompressedCommunication,
    Fp16Section,
    LocoSection,
    MemorySection,
    OptimizerConfig,
    SchedulerConfig,
    ZeroSection,
)
from hf_zero.config.techniques import (
    CURRICULUM,
    EFFICIENCY,
    LAYER_DROP,
    LEGACY,
    PHASES,
    ROUTING,
    SAMPLING,
    TOKEN_DROP,
    CurriculumSection,
    DataEfficiency,
    DataRouting,
    DataSampling,
    LayerDropSection,
    MetricCurricula,
    TokenDropSection,
    TrainingPhasesSection,
)

ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "efficient", "math")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of a configuration; see :class:`hf_zero.config.ZeroConfig`."""

    stage: int = key(
        integer(0, 3),
        0,
        "shards 1: optimizer state, 2: gradients too, 3: parameters too",
        name="zero_optimization.stage",
        required=True,
    )
    train_batch_size: int | None = key(
        integer(1),
        None,
        "samples per optimizer step: micro-batch × accumulation × data-parallel ranks",
        unit="samples",
    )
    train_micro_batch_size_per_gpu: int | None = key(
        integer(1), None, "samples per forward on one rank", unit="samples"
    )
    gradient_accumulation_steps: int | None = key(
        integer(1), None, "micro-batches per optimizer step", unit="micro-batches"
    )
    managed_gradient_accumulation: bool = key(
        BOOLEAN,
        True,
        "false makes every step() update the weights, whatever the number of "
        "micro-batches since the last update; gradient_accumulation_steps still divides "
        "the gradients",
    )
    elasticity: dict[str, Any] | None = key(
        SECTION,
        None,
        "batch sizes that fit many numbers of ranks: max_train_batch_size, micro_batch_sizes, "
        "min_gpus, max_gpus; every checkpoint resumes on any number of ranks without it",
        hash=False,
    )
    gradient_clipping: float = key(
        number(0),
        0.0,
        (
            "the largest global norm of the gradients, to which a step clips them; 0 disables "
            "clipping"
        ),
    )
    zero: ZeroSection = section("zero_optimization", ZeroSection)
    zeropp_loco_param: LocoSection = section("zero_optimization.zeropp_loco_param", LocoSection)
    fp16: Fp16Section = section("fp16", Fp16Section)
    bf16: Bf16Section = section("bf16", Bf16Section)
    torch_autocast: AutocastSection = section("torch_autocast", AutocastSection)
    optimizer: OptimizerConfig | None = section("optimizer", OptimizerConfig)
    scheduler: SchedulerConfig | None = section("scheduler", SchedulerConfig)
    prescale_gradients: bool = key(
        BOOLEAN, False, "divide gradients before they are summed over ranks"
    )
    gradient_predivide_factor: float = key(
        number(above=0), 1.0, "the number by which prescale_gradients divides before the sum"
    )
    gradient_allreduce_op: str = key(
        choice("mean", "sum"),
        "mean",
        "whether a step uses the mean or the sum of the gradients of all ranks",
    )
    communication_data_type: str | None = key(
        DTYPE,
        None,
        "the dtype in which gradients are reduced; null uses the dtype of the gradients",
    )
    gradient_accumulation_dtype: str | None = key(
        DTYPE,
        None,
        "the dtype in which the gradients of micro-batches are summed",
        name="data_types.grad_accum_dtype",
    )
    buffer_dtype: str | None = key(
        DTYPE,
        None,
        "the dtype to which the model's floating-point buffers are cast; null keeps their dtype",
        name="data_types.buffer_dtype",
    )
    keep_in_fp32_modules: tuple[str, ...] = key(
        NAMES,
        (),
        (
            "names of modules or parameters that compute in fp32 under bf16 and fp16, beside those "
            "that models of transformers declare"
        ),
        name="data_types.keep_in_fp32_modules",
    )
    elementwise_optimizers: tuple[str, ...] = key(
        NAMES,
        (),
        (
            "names of optimizer classes that, as you confirm, update each element "
            "independently of the others"
        ),
    )
    allow_untested_optimizer: bool = key(
        BOOLEAN,
        False,
        (
            "whether an optimizer class that hf-zero does not know runs if a probe of a few steps "
            "finds no difference between whole tensors and shards; one that fails is refused"
        ),
        name="zero_allow_untested_optimizer",
    )
    compressed_communication: CompressedCommunication = section(
        "compressed_communication", CompressedCommunication
    )
    tensor_parallel: TensorParallelSection = section(TENSOR, TensorParallelSection)
    sequence_parallel_size: int = key(
        integer(1),
        1,
        "number of neighbouring ranks that divide each sequence, and exchange tokens for "
        "heads in attention (Ulysses)",
        unit="ranks",
    )
    context_parallel_size: int = key(
        integer(1),
        1,
        "number of ranks that divide each sequence, and pass keys and values around a ring in "
        "attention; they multiply with sequence_parallel_size",
        unit="ranks",
    )
    pipeline: PipelineSection = section("pipeline", PipelineSection)
    expert_parallel: ExpertParallelSection = section(EXPERT_PARALLEL, ExpertParallelSection)
    replicate_size: int = key(
        integer(1),
        1,
        "number of copies of the shards; ranks / replicate_size ranks share one copy",
    )
    timeout: float = key(
        number(above=0),
        1800.0,
        "how long a rank waits for others before it raises an error",
        unit="seconds",
    )
    host_timeout: float = key(
        SECONDS_OR_OFF,
        15.0,
        "after how long without a heartbeat a host is unreachable, and all ranks end with an error "
        "that names it; at most timeout, which is the default if it is shorter; 0: the engine "
        "takes no part in heartbeats between hosts",
        unit="seconds",
    )
    distributed_backend: str | None = key(
        choice("gloo", "nccl"),
        None,
        "the library for collectives; null uses nccl on GPUs and gloo on CPUs",
    )
    distributed_port: int | None = key(
        integer(1, 65535),
        None,
        "the port of the rendezvous if the launcher does not set MASTER_PORT",
    )
    distributed_interface: str | None = key(
        TEXT, None, "the network interface for gloo and NCCL, such as eth0"
    )
    seed: int | None = key(COUNT, None, "the seed for random draws of the engine itself")
    kernels: str | tuple[str, ...] = key(
        KERNELS,
        "off",
        "fused kernels: off, auto (those that help on the training device), or a list of names",
    )
    sparse_attention: dict[str, Any] | None = key(
        SECTION,
        None,
        "block-sparse attention: mode, block, and the arguments of the mode; null keeps "
        "attention dense",
    )
    pre_layer_norm: bool = key(
        BOOLEAN,
        False,
        "move the norms of BERT-like models before attention and MLP, for training from scratch",
    )
    progressive_layer_drop: LayerDropSection = section(LAYER_DROP, LayerDropSection)
    compile: CompileSection = section("compile", CompileSection)
    attention_backend: str = key(
        choice(*ATTENTION_BACKENDS),
        "auto",
        "the kernel that scaled_dot_product_attention tries first, in the whole process; "
        "auto uses one that was measured to be faster on this type of GPU, or else "
        "torch's own order",
    )
    offload_optimizer: OffloadOptimizer = section(
        "zero_optimization.offload_optimizer", OffloadOptimizer
    )
    offload_param: OffloadParam = section("zero_optimization.offload_param", OffloadParam)
    aio: AioSection = section("aio", AioSection)
    checkpoint: CheckpointSection = section("checkpoint", CheckpointSection)
    memory_checkpoints: MemorySection = section("checkpoint.memory", MemorySection)
    activation_checkpointing: ActivationCheckpointing = section(
        "activation_checkpointing", ActivationCheckpointing
    )
    activation_offload: ActivationOffload = section("activation_offload", ActivationOffload)
    tiled_mlp: TiledMlpSection = section("tiled_mlp", TiledMlpSection)
    curriculum_learning: CurriculumSection = section(LEGACY, CurriculumSection)
    data_efficiency: DataEfficiency = section(EFFICIENCY, DataEfficiency)
    data_routing: DataRouting = section(ROUTING, DataRouting)
    random_ltd: TokenDropSection = section(TOKEN_DROP, TokenDropSection)
    data_sampling: DataSampling = section(SAMPLING, DataSampling)
    metric_curricula: MetricCurricula = section(CURRICULUM, MetricCurricula)
    quantize_training: QuantizeTraining = section(QUANTIZE, QuantizeTraining)
    eigenvalue: EigenvalueSection = section(EIGENVALUE, EigenvalueSection)
    compression_weights: WeightQuantization = section(WEIGHTS, WeightQuantization)
    quantization_aware_training: QuantizationAware = section(QAT, QuantizationAware)
    float8_training: Float8Training = section(FLOAT8, Float8Training)
    training_phases: TrainingPhasesSection = section(PHASES, TrainingPhasesSection)
    wall_clock_breakdown: bool = key(
        BOOLEAN,
        False,
        "log the milliseconds of forward, backward and step, one step later",
    )
    steps_per_print: float | None = key(
        INTERVAL,
        None,
        "number of steps between two lines in the log with loss, learning rate, gradient "
        "norm, samples per second, times, memory and collectives; without the key, rank 0 "
        "logs its first step and then at most one line in 30 seconds, unless a trainer or "
        "a progress bar shows the steps; null or infinity logs no such lines, and then "
        "logs times and memory at each step",
        unit="steps",
    )
    memory_breakdown: bool = key(
        BOOLEAN,
        False,
        "log the bytes of state by kind and tier, the bytes of the allocator, and the free memory",
    )
    dump_state: bool = key(
        BOOLEAN,
        False,
        "log units, flat buffers and optimizer groups when the engine has been created",
    )
    metrics: MetricsSection = section("metrics", MetricsSection)
    trace: TraceSection = section("trace", TraceSection)
    tensorboard: TensorBoardSection = section("tensorboard", TensorBoardSection)
    wandb: WandbSection = section("wandb", WandbSection)
    comet: CometSection = section("comet", CometSection)
    csv_monitor: CsvSection = section("csv_monitor", CsvSection)
    comms_logger: CommsLoggerSection = section("comms_logger", CommsLoggerSection)
    flops_profiler: FlopsProfilerSection = section("flops_profiler", FlopsProfilerSection)
    log_level: str | None = key(
        choice("debug", "info", "warning", "error", "critical"),
        None,
        "the level of hf-zero's log; null keeps the level that HF_ZERO_LOG_LEVEL sets",
    )
    dataloader_drop_last: bool = key(
        BOOLEAN, False, "drop the last batch of training_data if it is incomplete"
    )
