"""Keywords of :class:`hf_zero.ZeroConfig` with their types, for editors and type checkers;
``scripts/readme.py`` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch

    from hf_zero.config import (
        activations,
        low_bits,
        measures,
        memory,
        messages,
        offload,
        sections,
        techniques,
    )

    Dtype: TypeAlias = (
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
    )


class Keywords(TypedDict, total=False):
    train_batch_size: int | None
    """samples per optimizer step: micro-batch × accumulation × data-parallel ranks [samples]"""
    train_micro_batch_size_per_gpu: int | None
    """samples per forward on one rank [samples]"""
    gradient_accumulation_steps: int | None
    """micro-batches per optimizer step [micro-batches]"""
    managed_gradient_accumulation: bool | None
    """false makes every step() update the weights, whatever the number of micro-batches since
    the last update; gradient_accumulation_steps still divides the gradients
    """
    elasticity: Mapping[str, object] | None
    """batch sizes that fit many numbers of ranks: max_train_batch_size, micro_batch_sizes,
    min_gpus, max_gpus; every checkpoint resumes on any number of ranks without it
    """
    gradient_clipping: float | None
    """the largest global norm of the gradients, to which a step clips them; 0 disables clipping"""
    zero: sections.ZeroSection | Mapping[str, object] | None
    """The section ``zero_optimization``."""
    fp16: sections.Fp16Section | Mapping[str, object] | bool | None
    """The section ``fp16``."""
    bf16: sections.Bf16Section | Mapping[str, object] | bool | None
    """The section ``bf16``."""
    torch_autocast: sections.AutocastSection | Mapping[str, object] | None
    """The section ``torch_autocast``."""
    optimizer: sections.OptimizerConfig | Mapping[str, object] | None
    """The section ``optimizer``."""
    scheduler: sections.SchedulerConfig | Mapping[str, object] | None
    """The section ``scheduler``."""
    prescale_gradients: bool | None
    """divide gradients before they are summed over ranks"""
    gradient_predivide_factor: float | None
    """the number by which prescale_gradients divides before the sum"""
    gradient_allreduce_op: Literal["mean", "sum"] | None
    """whether a step uses the mean or the sum of the gradients of all ranks"""
    communication_data_type: Dtype | None
    """the dtype in which gradients are reduced; null uses the dtype of the gradients"""
    gradient_accumulation_dtype: Dtype | None
    """the dtype in which the gradients of micro-batches are summed"""
    buffer_dtype: Dtype | None
    """the dtype to which the model's floating-point buffers are cast; null keeps their dtype"""
    keep_in_fp32_modules: Sequence[str] | None
    """names of modules or parameters that compute in fp32 under bf16 and fp16, beside those that
    models of transformers declare
    """
    elementwise_optimizers: Sequence[str] | None
    """names of optimizer classes that, as you confirm, update each element independently of the
    others
    """
    allow_untested_optimizer: bool | None
    """whether an optimizer class that hf-zero does not know runs if a probe of a few steps finds
    no difference between whole tensors and shards; one that fails is refused
    """
    tensor_parallel: sections.TensorParallelSection | Mapping[str, object] | None
    """The section ``tensor_parallel``."""
    sequence_parallel_size: int | None
    """number of neighboring ranks that divide each sequence, and exchange tokens for heads in
    attention (Ulysses) [ranks]
    """
    context_parallel_size: int | None
    """number of ranks that divide each sequence, and pass keys and values around a ring in
    attention; they multiply with sequence_parallel_size [ranks]
    """
    pipeline: sections.PipelineSection | Mapping[str, object] | None
    """The section ``pipeline``."""
    expert_parallel: sections.ExpertParallelSection | Mapping[str, object] | None
    """The section ``expert_parallel``."""
    replicate_size: int | None
    """number of copies of the shards; ranks / replicate_size ranks share one copy"""
    timeout: float | None
    """how long a rank waits for others before it raises an error [seconds]"""
    host_timeout: Literal[0] | float | None
    """after how long without a heartbeat a host is unreachable, and all ranks end with an error
    that names it; at most timeout, which is the default if it is shorter; 0: the engine takes
    no part in heartbeats between hosts [seconds]
    """
    distributed_backend: Literal["gloo", "nccl"] | None
    """the library for collectives; null uses nccl on GPUs and gloo on CPUs"""
    distributed_port: int | None
    """the port of the rendezvous if the launcher does not set MASTER_PORT"""
    distributed_interface: str | None
    """the network interface for gloo and NCCL, such as eth0"""
    nccl: sections.NcclSection | Mapping[str, object] | None
    """The section ``nccl``."""
    seed: int | None
    """the seed for random draws of the engine itself"""
    kernels: (
        Literal["auto", "off", "on", True, False]
        | Sequence[
            Literal["norms", "activations", "rotary", "qkv", "residual", "loss", "optimizer"]
        ]
        | None
    )
    """fused kernels: off, auto (those that help on the training device), or a list of names"""
    sparse_attention: Mapping[str, object] | None
    """block-sparse attention: mode, block, and the arguments of the mode; null keeps attention
    dense
    """
    pre_layer_norm: bool | None
    """move the norms of BERT-like models before attention and MLP, for training from scratch"""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] | None
    """the kernel that scaled_dot_product_attention tries first, in the whole process; auto uses
    one that was measured to be faster on this type of GPU, or else torch's own order
    """
    offload_optimizer: (
        offload.OffloadOptimizer | Mapping[str, object] | Literal["none", "cpu", "nvme"] | None
    )
    """The section ``zero_optimization.offload_optimizer``."""
    offload_param: (
        offload.OffloadParam | Mapping[str, object] | Literal["none", "cpu", "nvme"] | None
    )
    """The section ``zero_optimization.offload_param``."""
    aio: offload.AioSection | Mapping[str, object] | None
    """The section ``aio``."""
    checkpoint: sections.CheckpointSection | Mapping[str, object] | None
    """The section ``checkpoint``."""
    wall_clock_breakdown: bool | None
    """log the milliseconds of forward, backward and step, one step later"""
    steps_per_print: float | None
    """number of steps between two lines in the log with loss, learning rate, gradient norm,
    samples per second, times, memory and collectives; without the key, rank 0 logs its first
    step and then at most one line in 30 seconds, unless a trainer or a progress bar shows the
    steps; null or infinity logs no such lines, and then logs times and memory at each step
    [steps]
    """
    memory_breakdown: bool | None
    """log the bytes of state by kind and tier, the bytes of the allocator, and the free memory"""
    dump_state: bool | None
    """log units, flat buffers and optimizer groups when the engine has been created"""
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None
    """the level of hf-zero's log; null keeps the level that HF_ZERO_LOG_LEVEL sets"""
    dataloader_drop_last: bool | None
    """drop the last batch of training_data if it is incomplete"""
    compressed_communication: messages.CompressedCommunication | Mapping[str, object] | None
    """The section ``compressed_communication``."""
    zeropp_loco_param: messages.LocoSection | Mapping[str, object] | None
    """The section ``zero_optimization.zeropp_loco_param``."""
    quantization_aware_training: low_bits.QuantizationAware | Mapping[str, object] | None
    """The section ``quantization_aware_training``."""
    float8_training: low_bits.Float8Training | Mapping[str, object] | None
    """The section ``float8_training``."""
    activation_checkpointing: activations.ActivationCheckpointing | Mapping[str, object] | None
    """The section ``activation_checkpointing``."""
    activation_offload: activations.ActivationOffload | Mapping[str, object] | bool | None
    """The section ``activation_offload``."""
    compile: activations.CompileSection | Mapping[str, object] | Literal[False, "blocks"] | None
    """The section ``compile``."""
    curriculum_learning: techniques.CurriculumSection | Mapping[str, object] | None
    """The section ``curriculum_learning``."""
    data_efficiency: techniques.DataEfficiency | Mapping[str, object] | None
    """The section ``data_efficiency``."""
    data_sampling: techniques.DataSampling | Mapping[str, object] | None
    """The section ``data_efficiency.data_sampling``."""
    metric_curricula: techniques.MetricCurricula | Mapping[str, object] | None
    """The section ``data_efficiency.data_sampling.curriculum_learning``."""
    training_phases: techniques.TrainingPhasesSection | Mapping[str, object] | None
    """The section ``training_phases``."""
    quantize_training: low_bits.QuantizeTraining | Mapping[str, object] | None
    """The section ``quantize_training``."""
    eigenvalue: low_bits.EigenvalueSection | Mapping[str, object] | None
    """The section ``quantize_training.eigenvalue``."""
    compression_weights: low_bits.WeightQuantization | Mapping[str, object] | None
    """The section ``compression_training.weight_quantization``."""
    progressive_layer_drop: techniques.LayerDropSection | Mapping[str, object] | None
    """The section ``progressive_layer_drop``."""
    data_routing: techniques.DataRouting | Mapping[str, object] | None
    """The section ``data_efficiency.data_routing``."""
    random_ltd: techniques.TokenDropSection | Mapping[str, object] | None
    """The section ``data_efficiency.data_routing.random_ltd``."""
    tiled_mlp: activations.TiledMlpSection | Mapping[str, object] | None
    """The section ``tiled_mlp``."""
    memory_checkpoints: memory.MemorySection | Mapping[str, object] | None
    """The section ``checkpoint.memory``."""
    comms_logger: measures.CommsLoggerSection | Mapping[str, object] | None
    """The section ``comms_logger``."""
    flops_profiler: measures.FlopsProfilerSection | Mapping[str, object] | None
    """The section ``flops_profiler``."""
    metrics: measures.MetricsSection | Mapping[str, object] | None
    """The section ``metrics``."""
    trace: measures.TraceSection | Mapping[str, object] | None
    """The section ``trace``."""
    tensorboard: measures.TensorBoardSection | Mapping[str, object] | None
    """The section ``tensorboard``."""
    wandb: measures.WandbSection | Mapping[str, object] | None
    """The section ``wandb``."""
    comet: measures.CometSection | Mapping[str, object] | None
    """The section ``comet``."""
    csv_monitor: measures.CsvSection | Mapping[str, object] | None
    """The section ``csv_monitor``."""
    prefetch_bucket_size: float | None
    """number of elements to gather ahead of their use [elements]"""
