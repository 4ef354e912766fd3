"""Keywords of :class:`hf_zero.ZeroConfig` with their types, for editors and type checkers;
``scripts/readme.py`` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from hf_zero.config.activations import (
        ActivationCheckpointing,
        ActivationOffload,
        TiledMlpSection,
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
        ExpertParallelSection,
        PipelineSection,
        TensorParallelSection,
    )
    from hf_zero.config.quantization import (
        EigenvalueSection,
        Float8Training,
        QuantizationAware,
        QuantizeTraining,
        WeightQuantization,
    )
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
        CurriculumSection,
        DataEfficiency,
        DataRouting,
        DataSampling,
        LayerDropSection,
        MetricCurricula,
        TokenDropSection,
        TrainingPhasesSection,
    )


class Keywords(TypedDict, total=False):
    train_batch_size: int | None
    """samples of one optimizer step: micro × accumulation × ranks [samples]"""
    train_micro_batch_size_per_gpu: int | None
    """samples of one forward on one rank [samples]"""
    gradient_accumulation_steps: int | None
    """micro-batches of one optimizer step [micro-batches]"""
    managed_gradient_accumulation: bool | None
    """false: every step() ends an accumulation window, however many micro-batches it has;
    gradient_accumulation_steps still divides losses
    """
    elasticity: Mapping[str, Any] | None
    """batch sizes that fit many numbers of ranks: max_train_batch_size, micro_batch_sizes,
    min_gpus, max_gpus; every checkpoint resumes on any number of ranks without it
    """
    gradient_clipping: float | None
    """the global norm is clipped to this; 0: never"""
    zero: ZeroSection | Mapping[str, Any] | None
    """The section ``zero_optimization``."""
    zeropp_loco_param: LocoSection | Mapping[str, Any] | None
    """The section ``zero_optimization.zeropp_loco_param``."""
    fp16: Fp16Section | Mapping[str, Any] | bool | None
    """The section ``fp16``."""
    bf16: Bf16Section | Mapping[str, Any] | bool | None
    """The section ``bf16``."""
    torch_autocast: AutocastSection | Mapping[str, Any] | None
    """The section ``torch_autocast``."""
    optimizer: OptimizerConfig | Mapping[str, Any] | None
    """The section ``optimizer``."""
    scheduler: SchedulerConfig | Mapping[str, Any] | None
    """The section ``scheduler``."""
    prescale_gradients: bool | None
    """divide gradients before they are summed over ranks"""
    gradient_predivide_factor: float | None
    """what prescale_gradients divides by beforehand"""
    gradient_allreduce_op: Literal["mean", "sum"] | None
    """what becomes of gradients over the ranks"""
    communication_data_type: (
        Literal[
            "fp32",
            "float32",
            "float",
            "torch.float32",
            "bf16",
            "bfp16",
            "bfloat16",
            "torch.bfloat16",
            "fp16",
            "float16",
            "half",
            "torch.float16",
        ]
        | torch.dtype
        | None
    )
    """dtype of reductions; none: that of the gradients"""
    gradient_accumulation_dtype: (
        Literal[
            "fp32",
            "float32",
            "float",
            "torch.float32",
            "bf16",
            "bfp16",
            "bfloat16",
            "torch.bfloat16",
            "fp16",
            "float16",
            "half",
            "torch.float16",
        ]
        | torch.dtype
        | None
    )
    """dtype in which micro-batches are summed"""
    buffer_dtype: (
        Literal[
            "fp32",
            "float32",
            "float",
            "torch.float32",
            "bf16",
            "bfp16",
            "bfloat16",
            "torch.bfloat16",
            "fp16",
            "float16",
            "half",
            "torch.float16",
        ]
        | torch.dtype
        | None
    )
    """dtype that floating-point buffers of the model are cast to; none: they keep theirs"""
    elementwise_optimizers: Sequence[str] | None
    """classes of optimizers that you vouch update each element by itself"""
    compressed_communication: CompressedCommunication | Mapping[str, Any] | None
    """The section ``compressed_communication``."""
    tensor_parallel: TensorParallelSection | Mapping[str, Any] | None
    """The section ``tensor_parallel``."""
    sequence_parallel_size: int | None
    """neighbouring ranks that read parts of the same sequences and exchange them for attention
    heads (Ulysses) [ranks]
    """
    pipeline: PipelineSection | Mapping[str, Any] | None
    """The section ``pipeline``."""
    expert_parallel: ExpertParallelSection | Mapping[str, Any] | None
    """The section ``expert_parallel``."""
    replicate_size: int | None
    """copies of the shards: ranks / replicate_size share one"""
    timeout: float | None
    """seconds until a silent wait is an error [seconds]"""
    distributed_backend: Literal["gloo", "nccl"] | None
    """what collectives run on; none: nccl for GPUs, gloo for CPUs"""
    distributed_port: int | None
    """where ranks meet if the launcher sets no MASTER_PORT"""
    distributed_interface: str | None
    """network device of gloo and NCCL, such as eth0"""
    seed: int | None
    """seed of what the engine itself draws"""
    kernels: (
        Literal["auto", "off", "on", True, False]
        | Sequence[
            Literal["norms", "activations", "rotary", "qkv", "residual", "loss", "optimizer"]
        ]
        | None
    )
    """fused kernels: off, auto (what helps on the device of the training), or names"""
    sparse_attention: Mapping[str, Any] | None
    """block-sparse attention: mode, block and what the mode takes; none: attention is dense"""
    pre_layer_norm: bool | None
    """BERT-like models: norms before attention and MLP, for training from scratch"""
    progressive_layer_drop: LayerDropSection | Mapping[str, Any] | None
    """The section ``progressive_layer_drop``."""
    compile: CompileSection | Mapping[str, Any] | Literal[False, "blocks"] | None
    """The section ``compile``."""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] | None
    """kernels that scaled_dot_product_attention tries first, in the whole process; auto: what
    was measured faster on such a GPU, else torch's own order
    """
    offload_optimizer: OffloadOptimizer | Mapping[str, Any] | Literal["none", "cpu", "nvme"] | None
    """The section ``zero_optimization.offload_optimizer``."""
    offload_param: OffloadParam | Mapping[str, Any] | Literal["none", "cpu", "nvme"] | None
    """The section ``zero_optimization.offload_param``."""
    aio: AioSection | Mapping[str, Any] | None
    """The section ``aio``."""
    checkpoint: CheckpointSection | Mapping[str, Any] | None
    """The section ``checkpoint``."""
    memory_checkpoints: MemorySection | Mapping[str, Any] | None
    """The section ``checkpoint.memory``."""
    activation_checkpointing: ActivationCheckpointing | Mapping[str, Any] | None
    """The section ``activation_checkpointing``."""
    activation_offload: ActivationOffload | Mapping[str, Any] | bool | None
    """The section ``activation_offload``."""
    tiled_mlp: TiledMlpSection | Mapping[str, Any] | None
    """The section ``tiled_mlp``."""
    curriculum_learning: CurriculumSection | Mapping[str, Any] | None
    """The section ``curriculum_learning``."""
    data_efficiency: DataEfficiency | Mapping[str, Any] | None
    """The section ``data_efficiency``."""
    data_routing: DataRouting | Mapping[str, Any] | None
    """The section ``data_efficiency.data_routing``."""
    random_ltd: TokenDropSection | Mapping[str, Any] | None
    """The section ``data_efficiency.data_routing.random_ltd``."""
    data_sampling: DataSampling | Mapping[str, Any] | None
    """The section ``data_efficiency.data_sampling``."""
    metric_curricula: MetricCurricula | Mapping[str, Any] | None
    """The section ``data_efficiency.data_sampling.curriculum_learning``."""
    quantize_training: QuantizeTraining | Mapping[str, Any] | None
    """The section ``quantize_training``."""
    eigenvalue: EigenvalueSection | Mapping[str, Any] | None
    """The section ``quantize_training.eigenvalue``."""
    compression_weights: WeightQuantization | Mapping[str, Any] | None
    """The section ``compression_training.weight_quantization``."""
    quantization_aware_training: QuantizationAware | Mapping[str, Any] | None
    """The section ``quantization_aware_training``."""
    float8_training: Float8Training | Mapping[str, Any] | None
    """The section ``float8_training``."""
    training_phases: TrainingPhasesSection | Mapping[str, Any] | None
    """The section ``training_phases``."""
    wall_clock_breakdown: bool | None
    """log the milliseconds of forward, backward and step, read a step late"""
    steps_per_print: float | None
    """steps between the lines of the log: loss, learning rate, gradient norm and samples per
    second, times, memory, collectives; not written: the first step of rank 0, and then a line
    in 30 seconds at most, where no trainer and no bar shows steps; null or infinity: none;
    times and memory then at each step [steps]
    """
    memory_breakdown: bool | None
    """log the bytes of state by kind and tier, of the allocator, and what is free"""
    dump_state: bool | None
    """log the engine's units, flat buffers and optimizer groups once it is made"""
    metrics: MetricsSection | Mapping[str, Any] | None
    """The section ``metrics``."""
    trace: TraceSection | Mapping[str, Any] | None
    """The section ``trace``."""
    tensorboard: TensorBoardSection | Mapping[str, Any] | None
    """The section ``tensorboard``."""
    wandb: WandbSection | Mapping[str, Any] | None
    """The section ``wandb``."""
    comet: CometSection | Mapping[str, Any] | None
    """The section ``comet``."""
    csv_monitor: CsvSection | Mapping[str, Any] | None
    """The section ``csv_monitor``."""
    comms_logger: CommsLoggerSection | Mapping[str, Any] | None
    """The section ``comms_logger``."""
    flops_profiler: FlopsProfilerSection | Mapping[str, Any] | None
    """The section ``flops_profiler``."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None
    """level of hf-zero's log from here on; null: as it is, by HF_ZERO_LOG_LEVEL"""
    dataloader_drop_last: bool | None
    """drop an incomplete last batch of training_data"""
    prefetch_bucket_size: float | None
    """elements gathered ahead of their use [elements]"""
