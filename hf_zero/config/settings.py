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
        "samples of one optimizer step: micro × accumulation × ranks",
        unit="samples",
    )
    train_micro_batch_size_per_gpu: int | None = key(
        integer(1), None, "samples of one forward on one rank", unit="samples"
    )
    gradient_accumulation_steps: int | None = key(
        integer(1), None, "micro-batches of one optimizer step", unit="micro-batches"
    )
    managed_gradient_accumulation: bool = key(
        BOOLEAN,
        True,
        "false: every step() ends an accumulation window, however many micro-batches it has; "
        "gradient_accumulation_steps still divides losses",
    )
    elasticity: dict[str, Any] | None = key(
        SECTION,
        None,
        "batch sizes that fit many numbers of ranks: max_train_batch_size, micro_batch_sizes, "
        "min_gpus, max_gpus; every checkpoint resumes on any number of ranks without it",
        hash=False,
    )
    gradient_clipping: float = key(number(0), 0.0, "the global norm is clipped to this; 0: never")
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
        number(above=0), 1.0, "what prescale_gradients divides by beforehand"
    )
    gradient_allreduce_op: str = key(
        choice("mean", "sum"), "mean", "what becomes of gradients over the ranks"
    )
    communication_data_type: str | None = key(
        DTYPE, None, "dtype of reductions; none: that of the gradients"
    )
    gradient_accumulation_dtype: str | None = key(
        DTYPE,
        None,
        "dtype in which micro-batches are summed",
        name="data_types.grad_accum_dtype",
    )
    buffer_dtype: str | None = key(
        DTYPE,
        None,
        "dtype that floating-point buffers of the model are cast to; none: they keep theirs",
        name="data_types.buffer_dtype",
    )
    elementwise_optimizers: tuple[str, ...] = key(
        NAMES, (), "classes of optimizers that you vouch update each element by itself"
    )
    compressed_communication: CompressedCommunication = section(
        "compressed_communication", CompressedCommunication
    )
    tensor_parallel: TensorParallelSection = section(TENSOR, TensorParallelSection)
    sequence_parallel_size: int = key(
        integer(1),
        1,
        "neighbouring ranks that read parts of the same sequences and exchange them for attention "
        "heads (Ulysses)",
        unit="ranks",
    )
    pipeline: PipelineSection = section("pipeline", PipelineSection)
    expert_parallel: ExpertParallelSection = section(EXPERT_PARALLEL, ExpertParallelSection)
    replicate_size: int = key(
        integer(1), 1, "copies of the shards: ranks / replicate_size share one"
    )
    timeout: float = key(
        number(above=0), 1800.0, "seconds until a silent wait is an error", unit="seconds"
    )
    distributed_backend: str | None = key(
        choice("gloo", "nccl"),
        None,
        "what collectives run on; none: nccl for GPUs, gloo for CPUs",
    )
    distributed_port: int | None = key(
        integer(1, 65535), None, "where ranks meet if the launcher sets no MASTER_PORT"
    )
    distributed_interface: str | None = key(
        TEXT, None, "network device of gloo and NCCL, such as eth0"
    )
    seed: int | None = key(COUNT, None, "seed of what the engine itself draws")
    kernels: str | tuple[str, ...] = key(
        KERNELS,
        "off",
        "fused kernels: off, auto (what helps on the device of the training), or names",
    )
    sparse_attention: dict[str, Any] | None = key(
        SECTION,
        None,
        "block-sparse attention: mode, block and what the mode takes; none: attention is dense",
    )
    pre_layer_norm: bool = key(
        BOOLEAN,
        False,
        "BERT-like models: norms before attention and MLP, for training from scratch",
    )
    progressive_layer_drop: LayerDropSection = section(LAYER_DROP, LayerDropSection)
    compile: CompileSection = section("compile", CompileSection)
    attention_backend: str = key(
        choice(*ATTENTION_BACKENDS),
        "auto",
        "kernels that scaled_dot_product_attention tries first, in the whole process; auto: "
        "what was measured faster on such a GPU, else torch's own order",
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
        "log the milliseconds of forward, backward and step, read a step late",
    )
    steps_per_print: float | None = key(
        INTERVAL,
        None,
        "steps between the lines of the log: loss, learning rate, gradient norm and samples per "
        "second, times, memory, collectives; not written: the first step of rank 0, and then a "
        "line in 30 seconds at most, where no trainer and no bar shows steps; null or infinity: "
        "none; times and memory then at each step",
        unit="steps",
    )
    memory_breakdown: bool = key(
        BOOLEAN,
        False,
        "log the bytes of state by kind and tier, of the allocator, and what is free",
    )
    dump_state: bool = key(
        BOOLEAN,
        False,
        "log the engine's units, flat buffers and optimizer groups once it is made",
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
        "level of hf-zero's log from here on; null: as it is, by HF_ZERO_LOG_LEVEL",
    )
    dataloader_drop_last: bool = key(
        BOOLEAN, False, "drop an incomplete last batch of training_data"
    )
