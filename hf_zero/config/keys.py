"""The table of all configuration keys: their kinds of values, and whether each is active, inert or
not built.

It holds the keys of DeepSpeed's JSON dialect, which Accelerate and the Trainer write, and our own.
Any other key is an error, whose message suggests the key that was likely meant.
"""

from __future__ import annotations

from hf_zero.config.activations import ACTIVATIONS
from hf_zero.config.kinds import (
    BOOLEAN,
    COUNT,
    DTYPE,
    NAMES,
    SIZE,
    TEXT,
    choice,
    integer,
)
from hf_zero.config.offload import FORMER, OFFLOAD, OFFLOAD_ALIASES
from hf_zero.config.parallelism import EXPERT_KEYS, TENSOR_ALIASES, TENSOR_KEYS
from hf_zero.config.quantization import COMPRESSIONS, SPELLINGS
from hf_zero.config.rows import (
    Key,
    Status,
    declared_keys,
    inert,
    larger_than_one,
    spellings,
    switched,
    unbuilt,
    under,
)
from hf_zero.config.settings import Settings
from hf_zero.config.techniques import CURRICULUM, ROUTING, SAMPLING, TOKEN_DROP

_UNIT = "hf-zero gathers and releases each unit, usually one block, as a whole"
_MESSAGE = "hf-zero sends each unit, usually one block, as one message"


_ZERO = under(
    "zero_optimization",
    inert(
        "contiguous_gradients",
        BOOLEAN,
        "the gradients of a unit are always contiguous in one flat buffer",
    ),
    inert(
        "reduce_scatter",
        BOOLEAN,
        "the stage determines whether gradients are reduce-scattered or all-reduced",
    ),
    inert("allgather_partitions", BOOLEAN, "updated parameters are always all-gathered"),
    inert("use_multi_rank_bucket_allreduce", BOOLEAN, _MESSAGE),
    inert(
        "sub_group_size", SIZE, "hf-zero updates a shard as one segment for each optimizer group"
    ),
    inert("stage3_max_reuse_distance", SIZE, _UNIT),
    inert("stage3_use_all_reduce_for_fetch_params", BOOLEAN, "units are always all-gathered"),
    inert("stage3_allgather_sequential", BOOLEAN, _MESSAGE),
    inert("elastic_checkpoint", BOOLEAN, "every checkpoint resumes on any number of ranks"),
    inert("grad_hooks", BOOLEAN, "hf-zero reduces the gradients of a unit when its backward ends"),
    inert("memory_efficient_linear", BOOLEAN, "hf-zero does not replace linear layers"),
    inert("pipeline_loading_checkpoint", BOOLEAN, "each rank reads its own byte ranges"),
    inert("override_module_apply", BOOLEAN, "hf-zero does not change Module.apply"),
    inert(
        "log_trace_cache_warnings",
        BOOLEAN,
        "hf-zero has no trace cache; it records the order of gathers once per mode",
    ),
    inert(
        "enable_sanity_checks",
        BOOLEAN,
        "ranks always agree on a collective that is new to the recorded order",
    ),
    inert(
        "save_muon_momentum_buffer_in_memory",
        BOOLEAN,
        "it concerns DeepSpeed's own Muon optimizer",
    ),
    unbuilt(
        "load_from_fp32_weights",
        BOOLEAN,
        "16-bit weights as the source of a checkpoint's fp32 masters",
        True,
    ),
    unbuilt("legacy_stage1", BOOLEAN, "the former stage 1"),
    switched(
        "zenflow",
        "ZenFlow, which updates most weights with gradients of earlier steps; write "
        "offload_optimizer, whose exact update overlaps the next forward",
        asks=bool,
        off="null",
    ),
)

_BATCH = ()

_FP16 = under(
    "fp16",
    unbuilt("fp16_master_weights_and_grads", BOOLEAN, "master weights in fp16"),
    # an older spelling, translated into fp16.enabled or bf16.enabled while reading
    Key(
        "type",
        choice("fp16", "float16", "bf16", "bfloat16"),
        Status.ACTIVE,
        "a former key; write the section bf16 or fp16",
    ),
)

_BF16 = under(
    "bf16",
    inert(
        "immediate_grad_update",
        BOOLEAN,
        "the engine always adds gradients to the accumulated ones when it reduces them",
    ),
    unbuilt(
        "bf16_master_weights_and_grads",
        BOOLEAN,
        "master weights in bf16",
        instead="master weights are in fp32, which takes two more bytes a parameter",
    ),
    Key(
        "bf16_optimizer_states",
        BOOLEAN,
        Status.ACTIVE,
        "store the moments in bf16 if the optimizer is offloaded",
    ),
    unbuilt("ddp_bf16", BOOLEAN, "DeepSpeed's DDP mode for bf16"),
)

_GRADIENTS = (
    unbuilt(
        "data_types.param_dtype",
        DTYPE,
        "parameters in a dtype other than the one that fp16 or bf16 selects",
        None,
    ),
    inert(
        "seq_parallel_communication_data_type",
        TEXT,
        "sequence_parallel_size exchanges activations in their own dtype",
    ),
    unbuilt(
        "fp32_allreduce", BOOLEAN, "the old name for fp32 reductions; use communication_data_type"
    ),
    inert(
        "sparse_gradients",
        BOOLEAN,
        "the engine makes the gradients of embeddings with sparse=True dense",
    ),
    inert(
        "disable_allgather",
        BOOLEAN,
        "hf-zero all-gathers updated parameters, and never broadcasts them one by one",
    ),
)

_OPTIMIZER = (
    inert("optimizer.torch_adam", BOOLEAN, "DeepSpeed reads this key only in optimizer.params"),
    inert("optimizer.legacy_fusion", BOOLEAN, "concerns DeepSpeed's fp16 LAMB"),
    inert(
        "zero_force_ds_cpu_optimizer",
        BOOLEAN,
        "with offload, hf-zero updates on the CPU with an optimizer of any class",
    ),
)

_RANKS = ()

_CHECKPOINT = under(
    "checkpoint",
    inert(
        "load_universal",
        BOOLEAN,
        "every checkpoint resumes on any number of ranks and at any stage; in scripts for "
        "DeepSpeed, latest_universal then has priority over latest",
    ),
    inert(
        "tag_validation", choice("ignore", "warn", "fail"), "rank 0 decides the tag of a checkpoint"
    ),
    inert("parallel_write.pipeline_stage", BOOLEAN, "each rank always writes its own file"),
    inert("checkpoint_serialization", BOOLEAN, "checkpoints are safetensors and JSON"),
    inert("writer.type", choice("fast", "python"), "hf-zero always streams files with direct I/O"),
    inert("writer.io_buffer_size", SIZE, "hf-zero always writes blocks of 16 MiB"),
    inert(
        "writer.io_buffer_double",
        BOOLEAN,
        "hf-zero always hashes one block while it writes another",
    ),
    inert("writer.io_multiplier", COUNT, "each rank writes one stream"),
    inert(
        "writer.show_statistics", BOOLEAN, "the log always shows how long a background save took"
    ),
    inert(
        "writer.data_parallel",
        choice("replica", "socket", "machine"),
        "all ranks always write, and each byte is written once",
    ),
)

_MISPLACED = (
    inert("optimizer.adam_w_mode", BOOLEAN, "DeepSpeed reads it in optimizer.params alone"),
    inert("stage3_max_live_parameters", SIZE, "DeepSpeed reads it in zero_optimization alone"),
)

_REPORTS = (
    inert("$schema", TEXT, "editors read the schema of the keys from it"),
    inert("vocabulary_size", COUNT, "DeepSpeed uses it only for a warning about alignment"),
    inert("timers.throughput.enabled", BOOLEAN, "metrics.enabled reports throughput"),
    inert("timers.throughput.synchronized", BOOLEAN, "metrics.enabled reports throughput"),
    switched(
        "monitor",
        "one section for all monitors; write tensorboard, wandb, comet or csv_monitor at "
        "the top level",
        "tensorboard wandb comet csv_monitor",
    ),
)

# Sections accepted or refused as a whole: a disabled one is accepted, an enabled one asks for a
# feature that is not built.
_FEATURES = (
    switched("amp", "Apex AMP; use bf16 or fp16"),
    inert(
        "torch_autocast.lower_precision_safe_modules",
        NAMES,
        "torch.autocast knows which operations are safe in fewer bits; communication "
        "keeps the dtype of the parameters",
    ),
    switched("msamp", "MS-AMP (fp8)", "opt_level"),
    switched(
        "inference",
        "the inference engine",
        asks=larger_than_one("tensor_parallel.tp_size"),
        off="{}",
    ),
    inert("pipeline.partition", TEXT, "set partition_method of the PipelineModule"),
    inert("pipeline.seed_layers", BOOLEAN, "set seed_layers of the PipelineModule"),
    inert("pipeline.pipe_partitioned", BOOLEAN, "tensor-parallel ranks send whole activations"),
    inert("pipeline.grad_partitioned", BOOLEAN, "tensor-parallel ranks send whole gradients"),
    inert(
        "pipeline.use_reentrant",
        BOOLEAN,
        "hf-zero never recomputes with the reentrant implementation",
    ),
    unbuilt(
        "use_data_before_expert_parallelism",
        BOOLEAN,
        "expert groups of ranks that are not neighbours",
    ),
    switched("hybrid_engine", "the hybrid engine for training and generation"),
    unbuilt("graph_harvesting", BOOLEAN, "CUDA graphs; write compile: blocks"),
    switched(
        f"{TOKEN_DROP}.layer_token_lr_schedule",
        "a learning rate that depends on the number of tokens; write a scheduler",
        "total_layer_tokens warmup_layer_tokens",
    ),
    switched(
        "autotuning",
        "autotuning; `hf-zero estimate MODEL --fit` finds a configuration that fits",
        instead="nothing is tuned; `hf-zero estimate MODEL --fit` finds a configuration that fits",
    ),
    switched(
        "weight_quantization",
        "quantized weights; load a quantized model instead",
        asks=bool,
        off="null",
    ),
    switched("nebula", "Nebula checkpoints; use checkpoint.async_save"),
    switched(
        "datastates_ckpt",
        "DataStates checkpoints; use checkpoint.async_save",
        asks=bool,
        off="null",
    ),
)

_DEEPCOMPILE = "hf-zero has no DeepCompile"
_COMPILE = under(
    "compile",
    unbuilt("deepcompile", BOOLEAN, "DeepCompile; write compile: blocks"),
    unbuilt("enabled", BOOLEAN, "a compiled model; write compile: blocks"),
    *(
        inert(name, BOOLEAN, _DEEPCOMPILE)
        for name in [
            "free_activation",
            "offload_activation",
            "offload_opt_states",
            "offload_parameters",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
        ]
    ),
    inert("offload_adam_states_threshold", integer(0), _DEEPCOMPILE),
)

_GROUPS = (
    tuple(declared_keys(Settings)),
    _ZERO,
    FORMER,
    OFFLOAD,
    _FP16,
    _BF16,
    _GRADIENTS,
    _OPTIMIZER,
    _RANKS,
    _CHECKPOINT,
    ACTIVATIONS,
    _MISPLACED,
    _REPORTS,
    _COMPILE,
    _FEATURES,
    TENSOR_KEYS,
    EXPERT_KEYS,
    COMPRESSIONS,
)

KEYS: dict[str, Key] = {key.path: key for group in _GROUPS for key in group}

# Keys with a value "auto" of their own, which Accelerate and the Trainer do not fill in.
OWN_AUTOS: frozenset[str] = frozenset(
    ("kernels", "attention_backend", "zero_optimization.offload_optimizer.ratio")
)

_STAGE3_FIELDS = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
    "max_live_parameters max_reuse_distance "
    "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential "
    "gather_16bit_weights_on_model_save"
)

# Alternative spellings: DeepSpeed's former names, the names of its Python fields, and our own
# keywords.
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in _STAGE3_FIELDS.split()
    },
    "prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zeropp_loco_param": "zero_optimization.zeropp_loco_param",
    "data_sampling": SAMPLING,
    "data_routing": ROUTING,
    "random_ltd": TOKEN_DROP,
    "metric_curricula": CURRICULUM,
    **spellings(Settings),
    **OFFLOAD_ALIASES,
    **SPELLINGS,
    **TENSOR_ALIASES,
    "checkpoint.writer.decoupled": "checkpoint.async_save",
    "memory_checkpoints": "checkpoint.memory",
    "flops_profiler.step": "flops_profiler.profile_step",
}

# Names that people write, by their lower-case form: what to write instead.
ANSWERS: dict[str, str] = {
    **{
        name: f"it is a parameter of the optimizer: write optimizer.params.{param} beside "
        "optimizer.type, or give it to the optimizer that the script makes"
        for name, param in (("lr", "lr"), ("learning_rate", "lr"), ("weight_decay", "weight_decay"))
    },
    "per_device_train_batch_size": "it is an argument of the Trainer; write "
    "train_micro_batch_size_per_gpu here",
    "per_gpu_train_batch_size": "write train_micro_batch_size_per_gpu",
    "max_grad_norm": "write gradient_clipping",
    **dict.fromkeys(
        ("num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps", "warmup_ratio"),
        "it is an argument of the Trainer, and belongs into TrainingArguments",
    ),
    **dict.fromkeys(
        ("fp8", "float8", "fp8_config"),
        "write float8_training: {recipe: tensorwise}, which multiplies matrices in float8",
    ),
    "monitor_config": "write tensorboard, wandb, comet or csv_monitor at the top",
    "comms_config": "write comms_logger: {enabled: true} at the top",
    "compile.disable": "blocks are compiled only with compile: blocks; remove it",
    "mixed_precision": "write bf16: {enabled: true} or fp16: {enabled: true}",
    **dict.fromkeys(
        [
            f"bf16.{name}"
            for name in (
                "loss_scale",
                "loss_scale_window",
                "initial_scale_power",
                "hysteresis",
                "min_loss_scale",
                "auto_cast",
            )
        ],
        "bf16 has the range of fp32 and needs no loss scale; remove it",
    ),
    **dict.fromkeys(
        ("fp16.opt_level", "fp16.fp16_opt_level"), "it is Apex's, not DeepSpeed's; remove it"
    ),
    "fsdp_config": "`hf-zero migrate` translates an Accelerate configuration for FSDP",
}

# Names that other libraries have for keys: their effect would be lost without a word.
MEANT: dict[str, str] = {
    **dict.fromkeys(("fsdp", "zero"), "zero_optimization"),
    "zero_stage": "stage",
    **dict.fromkeys(("float16", "half"), "fp16"),
    "gradient_checkpointing": "activation_checkpointing",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm"), "gradient_clipping"),
}

SECTIONS: frozenset[str] = frozenset(
    path[:dot] for path in (*KEYS, *ALIASES) for dot in range(len(path)) if path[dot] == "."
)
