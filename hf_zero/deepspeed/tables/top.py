"""``deepspeed`` itself, its accelerator, configuration, launcher and monitor."""

from __future__ import annotations

from hf_zero.deepspeed.rows import (
    Row,
    classes_not_built,
    functions_not_built,
    left_out,
    module,
    names,
)
from hf_zero.deepspeed.tables import (
    BY_HOSTS,
    BY_LAUNCHER,
    BY_TENSOR_PARALLEL,
    CONSTANT,
    EXPERT,
    GENERATE,
    INTERNAL,
    KERNELS,
    NO_DUALPIPE,
    PIPELINE,
    PROPOSE,
    QUANTIZED_MODEL,
    TORCH_GROUPS,
    TRAIN_ADAPTERS,
)

VERSIONS = names(
    ".facade",
    "__version__=VERSION version=VERSION git_hash=GIT git_branch=GIT __git_hash__=GIT "
    "__git_branch__=GIT",
)
CONFIG = names(".zero_config", "DeepSpeedConfig")
CONFIG_ERROR = names("hf_zero.errors", "DeepSpeedConfigError=ConfigError")

COMM: tuple[Row, ...] = (
    *names(
        "hf_zero.distributed.process_group",
        "destroy_process_group get_local_rank get_rank get_world_size is_initialized",
    ),
    *names(
        ".comm",
        "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all "
        "all_to_all_single allgather_fn barrier batch_isend_irecv broadcast "
        "broadcast_object_list default_pg_timeout gather get_world_group "
        "has_all_gather_into_tensor inference_all_reduce init_distributed "
        "initialize_mesh_device irecv isend monitored_barrier mpi_discovery recv reduce "
        "reduce_scatter reduce_scatter_fn reduce_scatter_tensor scatter send",
    ),
    *names(
        ".comm",
        "comms_logger configure log_summary",
    ),
    *classes_not_built(TORCH_GROUPS, "TorchBackend"),
    *left_out(
        "call all_reduce or all_gather_into_tensor of each tensor, with async_op=True",
        "all_gather_coalesced all_reduce_coalesced",
    ),
    *left_out(
        "log_summary(return_dict=True) returns the log; comms_logger.comms_dict is it",
        "get_comm_operation_count get_logged_comm_ops has_comm_data reset_log",
    ),
    *left_out(
        "torch has these collectives",
        "has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor",
    ),
    *left_out(
        "torch.distributed.get_process_group_ranks(group) returns them", "get_all_ranks_from_group"
    ),
    *left_out(
        BY_LAUNCHER,
        "get_local_rank_from_launcher get_world_rank_from_launcher "
        "get_world_size_from_launcher in_aml in_aws_sm in_dlts "
        "patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend",
    ),
    *left_out(
        INTERNAL,
        "get_default_args get_tensor_position get_tensor_kwarg get_msg_size_from_args "
        "get_debug_log_name cdb timers timer_summary nccl_backend mpi_backend ccl_backend "
        "hccl_backend timed_op init_deepspeed_backend set_backend enable_symm_mem_for_group",
    ),
)

TOP = (
    module(
        "deepspeed",
        "hf-zero answering to the name of DeepSpeed; nothing is installed under this name.",
        names(".engine", "DeepSpeedEngine"),
        names(".initializing", "add_config_arguments initialize"),
        CONFIG,
        CONFIG_ERROR,
        VERSIONS,
        names(".facade", "__version_major__=MAJOR __version_minor__=MINOR __version_patch__=PATCH"),
        names(".accelerator", "get_accelerator"),
        names(".comm", "init_distributed TORCH_DISTRIBUTED_DEFAULT_PORT=DEFAULT_PORT"),
        names(".zero_init", "OnDevice"),
        names(".op_builders", "HAS_TRITON"),
        names(".logs", "log_dist"),
        names(".initializing", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"),
        names("hf_zero.logging", "logger"),
        names("torch.optim", "DeepSpeedOptimizer=Optimizer"),
        names("torch.utils.data", "DeepSpeedDataLoader=DataLoader"),
        names("deepspeed", "dist=comm"),
        names("deepspeed.pipe", "PipelineModule"),
        names("deepspeed.runtime", "zero"),
        names(
            ".inference",
            "DeepSpeedInferenceConfig InferenceEngine init_inference",
        ),
        functions_not_built(KERNELS, "replace_transformer_layer"),
        names(".groups", "set_autotp_mode tp_model_init"),
        functions_not_built(
            BY_TENSOR_PARALLEL, "record_tp_model_init_args merge_tp_model_init_into_config"
        ),
        classes_not_built(GENERATE, "DeepSpeedHybridEngine"),
        classes_not_built(KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
        names(".pipeline", "PipelineEngine"),
        classes_not_built(NO_DUALPIPE, "DualPipeVEngine DualPipeVModule"),
        left_out("DeepSpeedInferenceConfig() has the defaults", "default_inference_config"),
        left_out("hf_zero.ZeroConfig.coerce reads configurations", "load_ds_config"),
        left_out(
            "internal to DeepSpeed's Muon",
            "MUON_OPTIMIZER set_optimizer_flags resolve_per_head_muon_after_sharding",
        ),
    ),
    module(
        "deepspeed.git_version_info",
        "The release.",
        VERSIONS,
        names(".facade", "torch_info=TORCH_INFO"),
    ),
    module(
        "deepspeed.constants",
        "The default port and timeout.",
        names(".comm", "TORCH_DISTRIBUTED_DEFAULT_PORT=DEFAULT_PORT default_pg_timeout"),
        names(".zero_config", "CROSS_RANK CROSS_SIZE"),
        left_out(CONSTANT, "INFERENCE_GENERIC_MODE INFERENCE_SPECIALIZED_MODE LOCAL_RANK"),
    ),
    module(
        "deepspeed.accelerator",
        "The device that this process computes on.",
        names(
            ".accelerator",
            "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator",
        ),
    ),
    module(
        "deepspeed.accelerator.abstract_accelerator",
        "The class of accelerators.",
        names(".accelerator", "DeepSpeedAccelerator"),
    ),
    module(
        "deepspeed.accelerator.cpu_accelerator",
        "The CPU as an accelerator.",
        left_out("get_accelerator() returns the one of this process", "CPU_Accelerator"),
    ),
    module(
        "deepspeed.accelerator.real_accelerator",
        "The accelerator of this process.",
        names(".accelerator", "get_accelerator is_current_accelerator_supported set_accelerator"),
        left_out(CONSTANT, "SUPPORTED_ACCELERATOR_LIST ds_accelerator"),
    ),
    module("deepspeed.launcher", "The launcher."),
    module(
        "deepspeed.launcher.runner",
        "The launcher, and the name that `accelerate launch` reads on every launch.",
        names(".launcher", "DEEPSPEED_ENVIRONMENT_NAME=ENVIRONMENT_FILE main"),
        names(".launcher", "DLTS_HOSTFILE=DEFAULT_HOSTFILE"),
        names(".launcher", "EXPORT_ENVS"),
        names(".launcher", "parse_args"),
        names(
            ".launcher",
            "encode_world_info fetch_hostfile parse_inclusion_exclusion parse_resource_filter",
        ),
        left_out(
            BY_HOSTS,
            "LAUNCHER_CLASSES parse_node_config parse_node_config_list apply_num_nodes_and_gpus",
        ),
        left_out("choose the configuration yourself: `hf-zero estimate --fit`", "run_autotuning"),
        left_out(
            CONSTANT,
            "EXCLUDE_ENVS DEEPSPEED_ENVIRONMENT_PATHS PDSH_MAX_FAN_OUT",
        ),
        command=".launcher:main",
    ),
    module(
        "deepspeed.launcher.multinode_runner",
        "Launchers of several hosts.",
        names(
            ".multinode_runner",
            "IMPIRunner MPICHRunner MVAPICHRunner MultiNodeRunner OpenMPIRunner PDSHRunner "
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
        names(".inference", "DeepSpeedInferenceConfig DeepSpeedMoEConfig DeepSpeedTPConfig"),
        classes_not_built(QUANTIZED_MODEL, "QuantizationConfig"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.inference.engine",
        "The engine.",
        names(".inference", "InferenceEngine"),
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
            "hf_zero.measures.monitors",
            "CometMonitor csvMonitor=CsvMonitor Monitor MonitorMaster TensorBoardMonitor "
            "WandbMonitor",
        ),
    ),
    *(
        module(
            f"deepspeed.monitor.{name}",
            "One of them.",
            names("hf_zero.measures.monitors", kind),
            left_out(INTERNAL, "*"),
        )
        for name, kind in (
            ("comet", "CometMonitor"),
            ("csv_monitor", "csvMonitor=CsvMonitor"),
            ("tensorboard", "TensorBoardMonitor"),
            ("wandb", "WandbMonitor"),
        )
    ),
    module(
        "deepspeed.monitor.config",
        "Their configuration.",
        names(
            "hf_zero.measures.monitors",
            "CometConfig=CometSection CSVConfig=CsvSection DeepSpeedMonitorConfig "
            "TensorBoardConfig=TensorBoardSection WandbConfig=WandbSection get_monitor_config",
        ),
    ),
    module("deepspeed.profiling", "Profiles."),
    module(
        "deepspeed.profiling.flops_profiler",
        "Counts of operations.",
        names(
            "hf_zero.measures.flops_profiler",
            "DEFAULT_PRECISION FlopsProfiler duration_to_string flops_to_string "
            "get_model_profile macs_to_string number_to_string params_to_string",
        ),
        left_out(
            INTERNAL,
            "Tensor module_flop_count module_mac_count old_functions wrapFunc "
            "MODULE_HOOK_MAPPING bytes_to_string get_module_flops get_module_macs "
            "get_module_duration",
        ),
    ),
    module("deepspeed.moe", "Mixtures of experts."),
    module(
        "deepspeed.moe.layer",
        "The layer.",
        names(f"{EXPERT}.moe_layer", "Experts MOELayer MoE TopKGate"),
    ),
    module(
        "deepspeed.moe.sharded_moe",
        "Its gate, and the way to the experts.",
        names(f"{EXPERT}.moe_layer", "Experts MOELayer TopKGate"),
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
        names(".groups", "configure_moe_param_groups has_moe_layers"),
        left_out("read the key moe of the group", "is_moe_param_group"),
        names(
            f"{EXPERT}.marks",
            "is_moe_param=is_expert_parameter "
            "split_params_into_different_moe_groups_for_optimizer=split_groups "
            "split_params_into_shared_and_expert_params=split",
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
        names(PIPELINE + ".module", "LayerSpec PipelineModule TiedLayerSpec"),
        classes_not_built(NO_DUALPIPE, "DualPipeVModule"),
    ),
    module(
        "deepspeed.comm",
        "hf-zero's process groups; every name that is not here is torch.distributed's.",
        COMM,
        others="hf_zero.distributed.process_group:dist",
    ),
    module(
        "deepspeed.comm.torch",
        "DeepSpeed's layer over torch.distributed.",
        classes_not_built(TORCH_GROUPS, "TorchBackend"),
        left_out(INTERNAL, "*"),
    ),
    module("deepspeed.compression", "Helpers that were a part of it."),
    module(
        "deepspeed.compression.helper",
        "Modules by dotted names.",
        names(".runtime_utils", "recursive_getattr recursive_setattr"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.module_inject",
        "Layers that DeepSpeed puts in the place of others.",
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.module_inject.layers",
        "Their parameters.",
        names(".groups", "GatherReplacedLayerParams"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.comm.comm",
        "The same.",
        COMM,
        others="hf_zero.distributed.process_group:dist",
    ),
)
