"""``deepspeed.utils``: access to shards, leaf modules, groups, logging, timers; and
``deepspeed.ops``: optimizers, sparse attention, and the builders of operators.
"""

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
    BY_TENSOR_PARALLEL,
    CONSTANT,
    FILES,
    GENERATE,
    INTERNAL,
    KERNELS,
    PROFILE,
)

ACCESS: tuple[Row, ...] = (
    *names(
        "hf_zero.zero.access.full",
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
        "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state",
    ),
    *names(
        "hf_zero.zero.access.local",
        "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
        "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
        "safe_update_full_grad_vectorized",
    ),
    *left_out(
        "use safe_get_full_* and safe_set_full_*",
        "tensor_fragment fragment_address get_full_hp_param set_full_hp_param "
        "get_full_hp_grad set_full_hp_grad get_hp_fragment_mapping map_to_flat_opt_states",
    ),
)
LEAVES: tuple[Row, ...] = (
    *names(
        "hf_zero.zero.layout.wrap",
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules "
        "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules "
        "z3_leaf_module",
    ),
    *left_out("ask z3_leaf_module of its module", "z3_leaf_parameter"),
)
GROUPS: tuple[Row, ...] = (
    *names(
        ".groups",
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size initialize",
    ),
    *names(
        ".groups",
        "get_model_parallel_group=get_tensor_parallel_group "
        "get_tensor_model_parallel_group=get_tensor_parallel_group "
        "get_model_parallel_rank=get_tensor_parallel_rank "
        "get_tensor_model_parallel_rank=get_tensor_parallel_rank "
        "get_model_parallel_world_size=get_tensor_parallel_world_size "
        "get_tensor_model_parallel_world_size=get_tensor_parallel_world_size "
        "get_tensor_model_parallel_src_rank=get_tensor_parallel_first_rank",
    ),
    *functions_not_built(
        BY_TENSOR_PARALLEL,
        "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size",
    ),
    *left_out(
        "the state of DeepSpeed's module", "mpu mesh_device expert_tensor_parallel_world_size"
    ),
)
ON_DEVICE = names(".zero_init", "OnDevice")
NVTX = names(".accelerator", "instrument_w_nvtx")

UTILS = (
    module(
        "deepspeed.utils",
        "Access to shards, leaf modules, logging.",
        ACCESS,
        LEAVES,
        GROUPS,
        ON_DEVICE,
        NVTX,
        names("hf_zero.distributed.process_group", "is_initialized"),
        names("hf_zero.logging", "logger"),
        names(".logs", "log_dist log_dist_once set_log_level_from_string"),
        names(".runtime_utils", "RepeatingLoader"),
        names(".runtime_utils", "recursive_getattr recursive_setattr"),
        left_out(INTERNAL, "get_caller_func link_hp_params lazy_init_hp_params_optimizer_state"),
        left_out("start the script with numactl and --no_python", "get_numactl_cmd"),
    ),
    module(
        "deepspeed.utils.groups",
        "All ranks are data parallel; of other parallelism there is one rank.",
        GROUPS,
        names(
            ".groups",
            "_get_data_parallel_group=get_data_parallel_group "
            "_get_data_parallel_group_ranks=get_data_parallel_group_ranks "
            "_get_data_parallel_rank=get_data_parallel_rank "
            "_get_data_parallel_world_size=get_data_parallel_world_size "
            "_get_sequence_data_parallel_group=get_data_parallel_group "
            "_get_sequence_data_parallel_rank=get_data_parallel_rank "
            "_get_sequence_data_parallel_world_size=get_data_parallel_world_size "
            "_get_broadcast_src_rank=first_rank",
        ),
        names(".groups", "_get_model_parallel_world_size=get_tensor_parallel_world_size"),
        names(
            ".groups",
            "_get_sequence_parallel_group=get_sequence_parallel_group "
            "_get_sequence_parallel_rank=get_sequence_parallel_rank "
            "_get_sequence_parallel_world_size=get_sequence_parallel_world_size",
        ),
        names(
            ".groups",
            "_create_expert_and_data_parallel=create "
            "_get_expert_data_parallel_rank=get_expert_data_parallel_rank "
            "_get_expert_data_parallel_world_size=get_expert_data_parallel_world_size "
            "_get_expert_parallel_group=get_expert_parallel_group "
            "_get_expert_parallel_rank=get_expert_parallel_rank "
            "_get_expert_parallel_world_size=get_expert_parallel_world_size "
            "_get_max_expert_size=get_max_expert_size "
            "_get_max_expert_size_name=get_max_expert_size_name",
        ),
        functions_not_built("use the engine's own reductions", "_get_expert_data_parallel_group"),
    ),
    module(
        "deepspeed.utils.logging",
        "Logging on chosen ranks.",
        names("hf_zero.logging", "logger"),
        names(
            ".logs",
            "get_log_level_from_string log_dist log_dist_once print_dist "
            "set_log_level_from_string should_log_le warning_once",
        ),
        left_out("logging.getLogger makes loggers", "LoggerFactory"),
        left_out(
            "logger.getEffectiveLevel() and the names of logging", "get_current_level log_levels"
        ),
        left_out("use print_dist(message, [0])", "print_rank_0"),
        left_out("use json.dump", "print_json_dist"),
        left_out("print(vars(args))", "print_configuration"),
        left_out(INTERNAL, "get_dist_msg"),
    ),
    module(
        "deepspeed.utils.comms_logging",
        "The log of collectives.",
        names("hf_zero.measures.comms_log", "CommsLogger convert_size"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.utils.numa",
        "Cores of this machine.",
        names(".launcher", "parse_range_list"),
        functions_not_built(
            "start the script with numactl and --no_python",
            "get_numactl_cmd get_numa_cores check_for_numactl_pkg",
        ),
        left_out(INTERNAL, "*"),
    ),
    module("deepspeed.utils.init_on_device", "Models made on a device.", ON_DEVICE),
    module(
        "deepspeed.utils.nvtx",
        "Ranges that a profiler shows.",
        NVTX,
        left_out(CONSTANT, "enable_nvtx DEEPSPEED_NVTX_DOMAIN"),
    ),
    module(
        "deepspeed.utils.pin_memory",
        "Who pins host memory: torch.",
        names(".op_builders", "get_active_native_pinned_memory"),
        left_out(
            "torch pins and frees; PinMemoryBuilder().load().pin_handle() locks by itself",
            "NativePinnedMemory get_native_pinned_memory",
        ),
    ),
    module("deepspeed.utils.tensor_fragment", "Access to shards.", ACCESS),
    module(
        "deepspeed.utils.timer",
        "Timers.",
        names(".logs", "SynchronizedWallClockTimer ThroughputTimer"),
        names("hf_zero.measures.comms_log", "trim_mean"),
        classes_not_built(PROFILE, "CudaEventTimer"),
        left_out(
            "leave the calls out: wall_clock_breakdown switches the engine's times", "NoopTimer"
        ),
        left_out(
            CONSTANT,
            "FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER "
            "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_INNER_GLOBAL_TIMER "
            "BACKWARD_REDUCE_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER STEP_MICRO_TIMER "
            "STEP_GLOBAL_TIMER TIME_EPSILON",
        ),
    ),
    module(
        "deepspeed.utils.torch",
        "Versions of torch.",
        names(".runtime_utils", "required_torch_version"),
        left_out(INTERNAL, "is_functorch_transforming register_grad_hook jit_script_compat"),
    ),
    module(
        "deepspeed.utils.z3_leaf_module",
        "Modules that are gathered whole.",
        LEAVES,
        left_out("the engine reads zero_optimization.leaf_module", "apply_zero_leaf_module_config"),
    ),
    module(
        "deepspeed.utils.zero_to_fp32",
        "Whole weights out of a sharded checkpoint.",
        names(
            "hf_zero.checkpoint",
            "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
        ),
        names(".state_dicts", "convert_zero_checkpoint_to_fp32_state_dict"),
        names(".state_dicts", "get_model_state_file get_optim_files"),
        functions_not_built(
            "convert_zero_checkpoint_to_fp32_state_dict writes fp32; cast what it wrote",
            "convert_zero_checkpoint_to_state_dict",
        ),
        left_out(
            FILES,
            "zero_model_state debug device OUTPUT_DTYPE_NAMES atoi natural_keys "
            "get_checkpoint_files get_model_state_files parse_model_states parse_optim_states "
            "zero3_partitioned_param_info GatheredTensor to_torch_tensor",
        ),
    ),
)


# ---- Operators ----

BUILDERS = names(
    ".op_builders",
    "AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder "
    "DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder "
    "FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder "
    "InferenceCutlassBuilder NotImplementedBuilder OpBuilder PinMemoryBuilder "
    "QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder "
    "ShareMemCommBuilder SparseAttnBuilder SpatialInferenceBuilder "
    "StochasticTransformerBuilder TransformerBuilder UtilsBuilder",
)
CPU_ADAM = names(".optimizers", "DeepSpeedCPUAdam")
FUSED_ADAM = names(".optimizers", "FusedAdam")
LAYERS = classes_not_built(KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig")
CPU_LAMB = classes_not_built(
    "take FusedLamb, also with offload", "DeepSpeedCPULamb", base="torch.optim:Optimizer"
)

OPS = (
    module(
        "deepspeed.ops",
        "Optimizers and sparse attention, and which operators are here.",
        names(".op_builders", "__compatible_ops__=COMPATIBLE"),
        LAYERS,
    ),
    module(
        "deepspeed.ops.adagrad",
        "Adagrad.",
        names(".optimizers", "DeepSpeedCPUAdagrad"),
    ),
    module(
        "deepspeed.ops.adam",
        "Adam and AdamW.",
        CPU_ADAM,
        FUSED_ADAM,
        classes_not_built(
            "offload the optimizer: its update overlaps the next forward",
            "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
            base="torch.optim:Optimizer",
        ),
    ),
    module("deepspeed.ops.adam.cpu_adam", "Adam on the host.", CPU_ADAM),
    module(
        "deepspeed.ops.adam.fused_adam",
        "Adam of the device.",
        FUSED_ADAM,
        left_out(INTERNAL, "multi_tensor_applier"),
    ),
    module(
        "deepspeed.ops.aio",
        "Files.",
        names(".op_builders", "AsyncIOBuilder"),
    ),
    module("deepspeed.ops.lamb", "Lamb.", names(".optimizers", "FusedLamb"), CPU_LAMB),
    module(
        "deepspeed.ops.lion",
        "Lion.",
        names(".optimizers", "DeepSpeedCPULion FusedLion"),
    ),
    module(
        "deepspeed.ops.op_builder",
        "Which operators are here.",
        BUILDERS,
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.ops.op_builder.all_ops",
        "All of them.",
        names(".op_builders", "ALL_OPS"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.ops.op_builder.builder",
        "What an operator answers.",
        names(".op_builders", "OpBuilder CUDAOpBuilder=OpBuilder"),
        left_out(CONSTANT, "YELLOW END WARNING DEFAULT_TORCH_EXTENSION_PATH"),
        left_out(
            "nothing is compiled on this machine",
            "DEFAULT_COMPUTE_CAPABILITIES MissingCUDAException CUDAMismatchException "
            "installed_cuda_version get_default_compute_capabilities cuda_minor_mismatch_ok "
            "assert_no_cuda_mismatch",
        ),
        left_out(INTERNAL, "probe_is_compatible"),
    ),
    module(
        "deepspeed.ops.sparse_attention",
        "Block-sparse attention.",
        names(".layers", "SparseAttentionUtils SparseSelfAttention"),
        names(
            "hf_zero.ops.sparse_attention",
            "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig "
            "FixedSparsityConfig LocalSlidingWindowSparsityConfig SparsityConfig "
            "VariableSparsityConfig",
        ),
        classes_not_built(
            "use hf_zero.optimize(model, sparse_attention=config), which keeps the layers",
            "BertSparseSelfAttention",
        ),
    ),
    module(
        "deepspeed.ops.transformer",
        "Layers of transformers.",
        LAYERS,
        classes_not_built(
            GENERATE,
            "DeepSpeedInferenceConfig DeepSpeedTransformerInference DeepSpeedMoEInferenceConfig "
            "DeepSpeedMoEInference",
        ),
    ),
    module(
        "deepspeed.ops.fp_quantizer",
        "Weights in 8 bits and fewer.",
        classes_not_built("load quantised weights", "FP_Quantize Quantizer"),
        functions_not_built("load quantised weights", "matmul_fp8"),
    ),
)
