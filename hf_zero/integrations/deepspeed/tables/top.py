"""``deepspeed`` itself, its accelerator, configuration, launcher and monitor."""

from __future__ import annotations

from hf_zero.integrations.deepspeed.rows import (
    Row,
    classes_not_built,
    functions_not_built,
    left_out,
    module,
    names,
)
from hf_zero.integrations.deepspeed.tables.remedies import (
    BY_HOSTS,
    BY_LAUNCHER,
    BY_TENSOR_PARALLEL,
    CONSTANT,
    EXPERT,
    GENERATE,
    HERE,
    INTERNAL,
    KERNELS,
    NO_DUALPIPE,
    PIPELINE,
    PROPOSE,
    QUANTIZED_MODEL,
    TRAIN_ADAPTERS,
)

VERSIONS = names(
    f"{HERE}.version",
    "VERSION as __version__",
    "VERSION as version",
    "GIT as git_hash",
    "GIT as git_branch",
    "GIT as __git_hash__",
    "GIT as __git_branch__",
)
CONFIG = names(f"{HERE}.zero_config", "DeepSpeedConfig")
CONFIG_ERROR = names("hf_zero.errors", "ConfigError as DeepSpeedConfigError")

COMM: tuple[Row, ...] = (
    *names(
        "hf_zero.distributed.process_group",
        "destroy_process_group",
        "get_local_rank",
        "get_rank",
        "get_world_size",
        "is_initialized",
    ),
    *names(
        f"{HERE}.comm",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "allgather_fn",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "default_pg_timeout",
        "gather",
        "get_all_ranks_from_group",
        "get_global_rank",
        "get_world_group",
        "has_all_gather_into_tensor",
        "has_all_reduce_coalesced",
        "has_coalescing_manager",
        "has_reduce_scatter_tensor",
        "inference_all_reduce",
        "init_distributed",
        "initialize_mesh_device",
        "irecv",
        "is_available",
        "isend",
        "monitored_barrier",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_fn",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    ),
    *names(
        f"{HERE}.comm_log",
        "comms_logger",
        "configure",
        "get_comm_operation_count",
        "get_logged_comm_ops",
        "has_comm_data",
        "log_summary",
        "reset_log",
    ),
    *left_out(
        BY_LAUNCHER,
        "get_local_rank_from_launcher get_world_rank_from_launcher "
        "get_world_size_from_launcher mpi_discovery in_aml in_aws_sm in_dlts "
        "patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend",
    ),
    *left_out(
        INTERNAL,
        "get_default_args get_tensor_position get_tensor_kwarg get_msg_size_from_args "
        "get_debug_log_name cdb timers timer_summary nccl_backend mpi_backend "
        "ccl_backend hccl_backend timed_op init_deepspeed_backend set_backend "
        "enable_symm_mem_for_group",
    ),
)

TOP = (
    module(
        "deepspeed",
        "hf-zero answering to the name of DeepSpeed; nothing is installed under this name.",
        names(f"{HERE}.engine", "DeepSpeedEngine"),
        names(f"{HERE}.initializing", "initialize"),
        CONFIG,
        CONFIG_ERROR,
        VERSIONS,
        names(
            f"{HERE}.version",
            "MAJOR as __version_major__",
            "MINOR as __version_minor__",
            "PATCH as __version_patch__",
        ),
        names(f"{HERE}.accelerator", "get_accelerator"),
        names(f"{HERE}.arguments", "add_config_arguments"),
        names(f"{HERE}.comm", "init_distributed", "DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT"),
        names(f"{HERE}.on_device", "OnDevice"),
        names(f"{HERE}.op_builders", "HAS_TRITON"),
        names(f"{HERE}.rank_logging", "log_dist"),
        names(
            f"{HERE}.signatures",
            "DeepSpeedOptimizerCallable",
            "DeepSpeedSchedulerCallable",
        ),
        names("hf_zero.logs", "logger"),
        names("torch.optim", "Optimizer as DeepSpeedOptimizer"),
        names("torch.utils.data", "DataLoader as DeepSpeedDataLoader"),
        names("deepspeed", "comm as dist"),
        names("deepspeed.pipe", "PipelineModule"),
        names("deepspeed.runtime", "zero"),
        names(
            f"{HERE}.inference",
            "DeepSpeedInferenceConfig",
            "InferenceEngine",
            "default_inference_config",
            "init_inference",
        ),
        functions_not_built(KERNELS, "replace_transformer_layer"),
        names(f"{HERE}.tensor_parallel", "set_autotp_mode", "tp_model_init"),
        functions_not_built(
            BY_TENSOR_PARALLEL, "record_tp_model_init_args merge_tp_model_init_into_config"
        ),
        classes_not_built(GENERATE, "DeepSpeedHybridEngine"),
        classes_not_built(KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
        names(f"{HERE}.pipeline", "PipelineEngine"),
        classes_not_built(NO_DUALPIPE, "DualPipeVEngine DualPipeVModule"),
        left_out("hf_zero.ZeroConfig.coerce reads configurations", "load_ds_config"),
        left_out(INTERNAL, "module_inject"),
        left_out(
            "internal to DeepSpeed's Muon",
            "MUON_OPTIMIZER set_optimizer_flags resolve_per_head_muon_after_sharding",
        ),
    ),
    module(
        "deepspeed.git_version_info",
        "The release.",
        VERSIONS,
        names(f"{HERE}.version", "TORCH_INFO as torch_info"),
    ),
    module(
        "deepspeed.constants",
        "The default port and timeout.",
        names(
            f"{HERE}.comm", "DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"
        ),
        left_out(
            CONSTANT,
            "INFERENCE_GENERIC_MODE INFERENCE_SPECIALIZED_MODE CROSS_RANK CROSS_SIZE LOCAL_RANK",
        ),
    ),
    module(
        "deepspeed.accelerator",
        "The device that this process computes on.",
        names(
            f"{HERE}.accelerator",
            "DeepSpeedAccelerator",
            "get_accelerator",
            "is_current_accelerator_supported",
            "set_accelerator",
        ),
    ),
    module(
        "deepspeed.accelerator.abstract_accelerator",
        "The class of accelerators.",
        names(f"{HERE}.accelerator", "DeepSpeedAccelerator"),
    ),
    module(
        "deepspeed.accelerator.cpu_accelerator",
        "The CPU as an accelerator.",
        names(f"{HERE}.accelerator", "CPUAccelerator as CPU_Accelerator"),
    ),
    module(
        "deepspeed.accelerator.real_accelerator",
        "The accelerator of this process.",
        names(
            f"{HERE}.accelerator",
            "get_accelerator",
            "is_current_accelerator_supported",
            "set_accelerator",
        ),
        left_out(CONSTANT, "SUPPORTED_ACCELERATOR_LIST ds_accelerator"),
    ),
    module("deepspeed.launcher", "The launcher."),
    module(
        "deepspeed.launcher.runner",
        "The launcher, and the name that `accelerate launch` reads on every launch.",
        names(f"{HERE}.launcher", "ENVIRONMENT_FILE as DEEPSPEED_ENVIRONMENT_NAME", "main"),
        names(f"{HERE}.launcher", "parse_args"),
        names(
            f"{HERE}.hostfiles",
            "encode_world_info",
            "fetch_hostfile",
            "parse_inclusion_exclusion",
            "parse_resource_filter",
        ),
        left_out(
            BY_HOSTS,
            "LAUNCHER_CLASSES parse_node_config parse_node_config_list apply_num_nodes_and_gpus",
        ),
        left_out("choose the configuration yourself: `hf-zero estimate --fit`", "run_autotuning"),
        left_out(
            CONSTANT,
            "DLTS_HOSTFILE EXPORT_ENVS EXCLUDE_ENVS DEEPSPEED_ENVIRONMENT_PATHS PDSH_MAX_FAN_OUT",
        ),
        command=f"{HERE}.launcher:main",
    ),
    module(
        "deepspeed.launcher.multinode_runner",
        "Launchers of several hosts.",
        names(
            f"{HERE}.multinode_runner",
            "IMPIRunner",
            "MPICHRunner",
            "MVAPICHRunner",
            "MultiNodeRunner",
            "OpenMPIRunner",
            "PDSHRunner",
            "SlurmRunner",
        ),
    ),
    module(
        "deepspeed.autotuning",
        "Search for a configuration.",
        classes_not_built(PROPOSE, "Autotuner"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.autotuning.autotuner",
        "The search.",
        classes_not_built(PROPOSE, "Autotuner"),
        left_out(INTERNAL, "*"),
    ),
    module("deepspeed.inference", "Engines that generate."),
    module(
        "deepspeed.inference.config",
        "Their configuration.",
        names(
            f"{HERE}.inference",
            "DeepSpeedInferenceConfig",
            "DeepSpeedMoEConfig",
            "DeepSpeedTPConfig",
        ),
        classes_not_built(QUANTIZED_MODEL, "QuantizationConfig"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.inference.engine",
        "The engine.",
        names(f"{HERE}.inference", "InferenceEngine"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.monitor",
        "Metrics to files and services.",
    ),
    module(
        "deepspeed.monitor.monitor",
        "All of them.",
        names(
            f"{HERE}.monitors",
            "CometMonitor",
            "CsvMonitor as csvMonitor",
            "Monitor",
            "MonitorMaster",
            "TensorBoardMonitor",
            "WandbMonitor",
        ),
    ),
    *(
        module(
            f"deepspeed.monitor.{name}",
            "One of them.",
            names(f"{HERE}.monitors", kind),
            left_out(INTERNAL, "*"),
        )
        for name, kind in (
            ("comet", "CometMonitor"),
            ("csv_monitor", "CsvMonitor as csvMonitor"),
            ("tensorboard", "TensorBoardMonitor"),
            ("wandb", "WandbMonitor"),
        )
    ),
    module(
        "deepspeed.monitor.config",
        "Their configuration.",
        names(
            f"{HERE}.monitors",
            "CometSection as CometConfig",
            "CsvSection as CSVConfig",
            "DeepSpeedMonitorConfig",
            "TensorBoardSection as TensorBoardConfig",
            "WandbSection as WandbConfig",
            "get_monitor_config",
        ),
    ),
    module("deepspeed.profiling", "Profiles."),
    module(
        "deepspeed.profiling.flops_profiler",
        "Counts of operations.",
        names(
            f"{HERE}.flops_profiler",
            "DEFAULT_PRECISION",
            "FlopsProfiler",
            "duration_to_string",
            "flops_to_string",
            "get_model_profile",
            "macs_to_string",
            "number_to_string",
            "params_to_string",
        ),
        left_out(
            INTERNAL,
            "Tensor module_flop_count module_mac_count old_functions wrapFunc MODULE_HOOK_MAPPING "
            "bytes_to_string get_module_flops get_module_macs get_module_duration",
        ),
    ),
    module("deepspeed.moe", "Mixtures of experts."),
    module(
        "deepspeed.moe.layer",
        "The layer.",
        names(f"{EXPERT}.moe_layer", "Experts", "MOELayer", "MoE", "TopKGate"),
    ),
    module(
        "deepspeed.moe.sharded_moe",
        "Its gate, and the way to the experts.",
        names(f"{EXPERT}.moe_layer", "Experts", "MOELayer", "TopKGate"),
        left_out(
            "TopKGate.route returns where tokens go",
            "top1gating top2gating topkgating einsum einsum_sec_sm_ecm multiplicative_jitter "
            "gumbel_rsample",
        ),
        left_out(INTERNAL, "*"),
    ),
    module("deepspeed.moe.experts", "Experts.", names(f"{EXPERT}.moe_layer", "Experts")),
    module(
        "deepspeed.moe.utils",
        "Parameters of experts.",
        names(
            f"{HERE}.expert_parameters",
            "configure_moe_param_groups",
            "has_moe_layers",
            "is_moe_param_group",
        ),
        names(
            f"{EXPERT}.marks",
            "is_expert_parameter as is_moe_param",
            "split_groups as split_params_into_different_moe_groups_for_optimizer",
            "split as split_params_into_shared_and_expert_params",
        ),
        left_out(
            "gradients are the engine's: safe_get_full_grad",
            "split_params_grads_into_shared_and_expert_params",
        ),
    ),
    module(
        "deepspeed.linear",
        "Linear layers with adapters.",
        classes_not_built(TRAIN_ADAPTERS, "OptimizedLinear LoRAConfig QuantizationConfig Init"),
        functions_not_built(TRAIN_ADAPTERS, "init_lora"),
    ),
    module(
        "deepspeed.linear.config",
        "Their configuration.",
        classes_not_built(TRAIN_ADAPTERS, "LoRAConfig QuantizationConfig"),
    ),
    module(
        "deepspeed.linear.optimized_linear",
        "The layers.",
        classes_not_built(TRAIN_ADAPTERS, "OptimizedLinear LoRAOptimizedLinear"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.pipe",
        "Pipeline parallelism.",
        names(PIPELINE + ".module", "PipelineModule"),
        names(PIPELINE + ".layers", "LayerSpec", "TiedLayerSpec"),
        classes_not_built(NO_DUALPIPE, "DualPipeVModule"),
    ),
    module(
        "deepspeed.comm",
        "hf-zero's process groups; every name that is not here is torch.distributed's.",
        COMM,
        others="hf_zero.distributed.process_group:dist",
    ),
    module(
        "deepspeed.comm.comm",
        "The same.",
        COMM,
        others="hf_zero.distributed.process_group:dist",
    ),
)
