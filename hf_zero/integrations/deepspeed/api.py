"""``import deepspeed``, answered by hf-zero: every module and name of DeepSpeed that there is.

A row is a module: its dotted path, what it holds, and its names with the module each comes from,
or what to do instead where it is not built. ``facade.py`` makes the modules; a name is imported
when it is first used. To provide another name, add it to its row; its code lives in a file of this
folder or in the package that does the work.
"""

from __future__ import annotations

from hf_zero.integrations.deepspeed.rows import (
    Module,
    classes_not_built,
    functions_not_built,
    module,
    names,
)

HERE = "hf_zero.integrations.deepspeed"
ESTIMATE = (
    "call hf_zero.estimate(model, ranks=N), or `hf-zero estimate`: bytes on each rank at every "
    "stage, without memory for the model"
)
NO_SEQUENCE_PARALLEL = "set sp_size to 1"

ACTIVATION_CHECKPOINTING = (
    *names(
        f"{HERE}.activation_checkpointing",
        "checkpoint",
        "configure",
        "is_configured",
        "checkpoint as non_reentrant_checkpoint",
        "partition_activations_in_checkpoint",
        "reset",
        "set_num_layers",
    ),
    *names(f"{HERE}.rng_tracker", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"),
)
ZERO = (
    *names("hf_zero.core.gathered", "GatheredParameters"),
    *names("hf_zero.core.parameter", "ZeroParamStatus"),
    *names(f"{HERE}.zero_init", "Init", "register_external_parameter"),
)

MODULES: tuple[Module, ...] = (
    module(
        "deepspeed",
        "hf-zero answering to the name of DeepSpeed; nothing is installed under this name.",
        names(f"{HERE}.engine", "DeepSpeedEngine", "initialize"),
        names("hf_zero.errors", "ConfigError as DeepSpeedConfigError"),
        names(f"{HERE}.facade", "VERSION as __version__"),
        names(f"{HERE}.accelerator", "get_accelerator"),
        names(f"{HERE}.arguments", "add_config_arguments"),
        names(f"{HERE}.comm", "init_distributed"),
        names(f"{HERE}.rank_logging", "log_dist"),
        names("hf_zero.logs", "logger"),
        names("deepspeed", "comm as dist"),
        names("deepspeed.pipe", "PipelineModule"),
        names("deepspeed.runtime", "zero"),
        functions_not_built(
            "generate with the engine's module, `engine.module.generate(...)`", "init_inference"
        ),
        functions_not_built("remove `tensor_parallel` from the configuration", "tp_model_init"),
    ),
    module(
        "deepspeed.accelerator",
        "The device that this process computes on.",
        names(f"{HERE}.accelerator", "get_accelerator"),
    ),
    module("deepspeed.checkpoint", "Checkpoints."),
    module(
        "deepspeed.checkpoint.utils",
        "State dicts to be saved.",
        names(f"{HERE}.state_dicts", "clone_tensors_for_torch_save"),
    ),
    module("deepspeed.checkpointing", "Activation checkpointing.", ACTIVATION_CHECKPOINTING),
    module(
        "deepspeed.comm",
        "hf-zero's process groups; every name that is not here is torch.distributed's.",
        names(
            "hf_zero.distributed.process_group",
            "destroy_process_group",
            "get_local_rank",
            "get_rank",
            "get_world_size",
            "is_initialized",
        ),
        names("hf_zero.distributed.world_group", "barrier"),
        names(f"{HERE}.comm", "init_distributed"),
        others="hf_zero.distributed.process_group:dist",
    ),
    module("deepspeed.launcher", "The launcher."),
    module(
        "deepspeed.launcher.runner",
        "The launcher, and the name that `accelerate launch` reads on every launch.",
        names(f"{HERE}.launcher", "ENVIRONMENT_FILE as DEEPSPEED_ENVIRONMENT_NAME", "main"),
        command=f"{HERE}.launcher:main",
    ),
    module("deepspeed.ops", "Optimizers and sparse attention."),
    module(
        "deepspeed.ops.adagrad",
        "Adagrad.",
        names(f"{HERE}.optimizers", "DeepSpeedCPUAdagrad"),
    ),
    module(
        "deepspeed.ops.adam",
        "Adam and AdamW.",
        names(f"{HERE}.optimizers", "DeepSpeedCPUAdam", "FusedAdam"),
    ),
    module(
        "deepspeed.ops.lamb",
        "Lamb.",
        classes_not_built(
            "it needs norms of whole tensors; use an element-wise optimizer such as AdamW",
            "DeepSpeedCPULamb",
            "FusedLamb",
            base="torch.optim:Optimizer",
        ),
    ),
    module(
        "deepspeed.ops.lion",
        "Lion.",
        names(f"{HERE}.optimizers", "DeepSpeedCPULion", "FusedLion"),
    ),
    module(
        "deepspeed.ops.sparse_attention",
        "Block-sparse attention.",
        names(f"{HERE}.sparse_attention", "SparseAttentionUtils", "SparseSelfAttention"),
        names(
            "hf_zero.ops.sparse_attention",
            "BSLongformerSparsityConfig",
            "BigBirdSparsityConfig",
            "DenseSparsityConfig",
            "FixedSparsityConfig",
            "LocalSlidingWindowSparsityConfig",
            "SparsityConfig",
            "VariableSparsityConfig",
        ),
        classes_not_built(
            "use hf_zero.optimize(model, sparse_attention=config), which keeps the layers",
            "BertSparseSelfAttention",
        ),
    ),
    module(
        "deepspeed.pipe",
        "Pipeline parallelism.",
        classes_not_built(
            "pass the whole model to initialize, at stage 3 if it does not fit",
            "LayerSpec",
            "PipelineModule",
            "TiedLayerSpec",
        ),
    ),
    module(
        "deepspeed.runtime",
        "The engine and what it trains with.",
        names("torch.optim", "Optimizer as DeepSpeedOptimizer", "Optimizer as ZeROOptimizer"),
    ),
    module("deepspeed.runtime.activation_checkpointing", "Activation checkpointing."),
    module(
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "Activation checkpointing.",
        ACTIVATION_CHECKPOINTING,
    ),
    module(
        "deepspeed.runtime.base_optimizer",
        "The engine keeps the user's own optimizer object, which is a torch one.",
        names("torch.optim", "Optimizer as DeepSpeedOptimizer", "Optimizer as ZeROOptimizer"),
    ),
    module(
        "deepspeed.runtime.config",
        "The configuration's error.",
        names("hf_zero.errors", "ConfigError as DeepSpeedConfigError"),
    ),
    module(
        "deepspeed.runtime.dataloader",
        "Data loaders: that of initialize(training_data=...) is torch's.",
        names("torch.utils.data", "DataLoader as DeepSpeedDataLoader"),
        names(f"{HERE}.repeating_loader", "RepeatingLoader"),
    ),
    module(
        "deepspeed.runtime.engine",
        "The engine.",
        names(f"{HERE}.engine", "DeepSpeedEngine"),
    ),
    module(
        "deepspeed.runtime.lr_schedules",
        "Learning rate schedules.",
        names(
            "hf_zero.optim.schedules",
            "VALID_LR_SCHEDULES",
            "LRRangeTest",
            "OneCycle",
            "WarmupCosineLR",
            "WarmupDecayLR",
            "WarmupLR",
        ),
    ),
    module("deepspeed.runtime.sequence_parallel", "Sequence parallelism."),
    module(
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "Sequence parallelism by attention heads.",
        classes_not_built(
            NO_SEQUENCE_PARALLEL, "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"
        ),
    ),
    module(
        "deepspeed.runtime.utils",
        "Memory in use.",
        names(f"{HERE}.rank_logging", "see_memory_usage"),
    ),
    module(
        "deepspeed.runtime.zero",
        "Models in shards: construction, access.",
        ZERO,
        classes_not_built("use nn.Linear: a unit is gathered whole", "TiledLinear"),
    ),
    module(
        "deepspeed.runtime.zero.partition_parameters",
        "Models in shards: construction, access.",
        ZERO,
        names(f"{HERE}.zero_init", "zero_wrapper_for_fp_tensor_constructor"),
        names(f"{HERE}.accelerator", "get_accelerator"),
        names("torch", "arange as _orig_torch_arange"),
    ),
    module(
        "deepspeed.runtime.zero.stage3",
        "Estimates of memory for stage 3.",
        functions_not_built(
            ESTIMATE,
            "estimate_zero3_model_states_mem_needs",
            "estimate_zero3_model_states_mem_needs_all_cold",
            "estimate_zero3_model_states_mem_needs_all_live",
        ),
    ),
    module(
        "deepspeed.runtime.zero.stage_1_and_2",
        "Estimates of memory for stages 1 and 2.",
        functions_not_built(
            ESTIMATE,
            "estimate_zero2_model_states_mem_needs",
            "estimate_zero2_model_states_mem_needs_all_cold",
            "estimate_zero2_model_states_mem_needs_all_live",
        ),
    ),
    module(
        "deepspeed.utils",
        "Access to shards, leaf modules, logging.",
        names(
            "hf_zero.core.gathered",
            "safe_get_full_fp32_param",
            "safe_get_full_grad",
            "safe_get_full_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_grad",
            "safe_set_full_optimizer_state",
        ),
        names("hf_zero.distributed.process_group", "is_initialized"),
        names("hf_zero.logs", "logger"),
        names(
            f"{HERE}.leaf_modules",
            "get_z3_leaf_modules",
            "set_z3_leaf_modules",
            "unset_z3_leaf_modules",
            "z3_leaf_module",
        ),
        names(f"{HERE}.rank_logging", "log_dist"),
        names(f"{HERE}.repeating_loader", "RepeatingLoader"),
    ),
    module(
        "deepspeed.utils.groups",
        "All ranks are data parallel; there are no sequence parallel groups.",
        names(
            "hf_zero.distributed.process_group",
            "get_rank as _get_data_parallel_rank",
            "get_world_size as _get_data_parallel_world_size",
        ),
        functions_not_built(
            NO_SEQUENCE_PARALLEL,
            "_get_sequence_parallel_group",
            "_get_sequence_parallel_rank",
            "_get_sequence_parallel_world_size",
        ),
    ),
    module(
        "deepspeed.utils.logging",
        "Logging on chosen ranks.",
        names("hf_zero.logs", "logger"),
        names(f"{HERE}.rank_logging", "log_dist", "print_dist", "print_rank_0"),
    ),
    module(
        "deepspeed.utils.zero_to_fp32",
        "Whole weights out of a sharded checkpoint.",
        names(
            "hf_zero.checkpoint",
            "convert_zero_checkpoint_to_fp32_state_dict",
            "get_fp32_state_dict_from_zero_checkpoint",
            "load_state_dict_from_zero_checkpoint",
        ),
        names(f"{HERE}.state_dicts", "get_model_state_file", "get_optim_files"),
    ),
)

API: dict[str, Module] = {row.path: row for row in MODULES}
