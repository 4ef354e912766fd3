"""``deepspeed.runtime``: the engine, schedules, loaders, ZeRO; and checkpoints."""

from __future__ import annotations

from hf_zero.integrations.deepspeed.rows import (
    Row,
    classes_not_built,
    functions_not_built,
    left_out,
    module,
    names,
)
from hf_zero.integrations.deepspeed.schedule_names import CONSTANTS
from hf_zero.integrations.deepspeed.tables.remedies import (
    BY_CONFIG,
    CONSTANT,
    FILES,
    GENERATE,
    HERE,
    INTERNAL,
    NO_PIPELINE,
    NO_SEQUENCE_PARALLEL,
)
from hf_zero.integrations.deepspeed.tables.top import CONFIG, CONFIG_ERROR

ACTIVATION_CHECKPOINTING: tuple[Row, ...] = (
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
    *names(
        f"{HERE}.rng_tracker",
        "RandomStates as CudaRNGStatesTracker",
        "get_cuda_rng_tracker",
        "model_parallel_cuda_manual_seed",
        "model_parallel_cuda_manual_seed as model_parallel_reconfigure_tp_seed",
    ),
    *left_out(
        "torch.utils.checkpoint keeps and recomputes activations",
        "CheckpointFunction detach_variable extract_tensors merge_tensors "
        "is_activation_to_checkpoint partition_activations get_partition_start "
        "get_partition_size gather_partitioned_activations "
        "get_partitioned_activations_for_backward get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward restore_offloaded_activations",
    ),
    *left_out(
        "the state of DeepSpeed's module; configure() sets it",
        "deepspeed_checkpointing_enabled mpu mp_rank mp_size mp_group num_layers "
        "contiguous_data_buffers data_offsets contiguous_size_buffers size_offsets timers "
        "PARTITION_ACTIVATIONS CPU_CHECKPOINT CONTIGUOUS_CHECKPOINTING SYNCHRONIZE PROFILE_TIME",
    ),
)
ZERO: tuple[Row, ...] = (
    *names("hf_zero.core.gathered", "GatheredParameters"),
    *names("hf_zero.core.parameter", "ZeroParamStatus"),
    *names(f"{HERE}.zero_init", "Init", "register_external_parameter"),
    *left_out("all parameters are of this rank: there are no remote ones", "ZeroParamType"),
    *left_out("tensor constructors are left alone", "DeepSpeedTensorOverride"),
)
TILED = names(f"{HERE}.tiled_linear", "TiledLinear", "TiledLinearReturnBias")
GENERATION = names(f"{HERE}.generation", "unwrap_model_for_generation")
OFFLOAD = names(
    f"{HERE}.zero_config",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
)
OPTIMIZERS = names("torch.optim", "Optimizer as DeepSpeedOptimizer", "Optimizer as ZeROOptimizer")
OWN_OPTIMIZER = "the engine keeps the user's own optimizer object; engine.optimizer is it"

RUNTIME = (
    module("deepspeed.checkpoint", "Checkpoints.", left_out(FILES, "*")),
    module(
        "deepspeed.checkpoint.utils",
        "State dicts to be saved.",
        names(f"{HERE}.state_dicts", "clone_tensors_for_torch_save"),
        left_out(
            FILES,
            "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank get_layer_ckpt_name_for_rank",
        ),
    ),
    module("deepspeed.checkpointing", "Activation checkpointing.", ACTIVATION_CHECKPOINTING),
    module("deepspeed.runtime", "The engine and what it trains with.", OPTIMIZERS),
    module("deepspeed.runtime.activation_checkpointing", "Activation checkpointing."),
    module(
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "Activation checkpointing.",
        ACTIVATION_CHECKPOINTING,
    ),
    module(
        "deepspeed.runtime.base_optimizer",
        "The engine keeps the user's own optimizer object, which is a torch one.",
        OPTIMIZERS,
        left_out(INTERNAL, "BackwardHookStateManager"),
    ),
    module(
        "deepspeed.runtime.config",
        "Configurations.",
        CONFIG,
        CONFIG_ERROR,
        names(
            f"{HERE}.zero_config",
            "ADAGRAD_OPTIMIZER",
            "ADAMW_OPTIMIZER",
            "ADAM_OPTIMIZER",
            "LAMB_OPTIMIZER",
            "LION_OPTIMIZER",
            "get_gradient_clipping",
        ),
        left_out(BY_CONFIG, "*"),
    ),
    module(
        "deepspeed.runtime.config_utils",
        "Parts of configurations.",
        classes_not_built("use pydantic.BaseModel itself", "DeepSpeedConfigModel"),
        left_out(
            BY_CONFIG,
            "get_config_default pp_int ScientificNotationEncoder DeepSpeedConfigObject "
            "get_scalar_param get_list_param get_dict_param dict_raise_error_on_duplicate_keys",
        ),
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
        names(
            f"{HERE}.signatures",
            "DeepSpeedOptimizerCallable",
            "DeepSpeedSchedulerCallable",
        ),
        left_out(CONSTANT, "MEMORY_OPT_ALLREDUCE_SIZE CASTABLE_DTYPES"),
        left_out(INTERNAL, "split_half_float_double_sparse EngineTimers"),
    ),
    module("deepspeed.runtime.fp16", "Training in fp16."),
    module(
        "deepspeed.runtime.fp16.loss_scaler",
        "Loss scales.",
        names(
            f"{HERE}.loss_scalers",
            "CONSECUTIVE_HYSTERESIS",
            "CreateLossScaler",
            "DELAYED_SHIFT",
            "DynamicLossScaler",
            "INITIAL_LOSS_SCALE",
            "LossScaler",
            "LossScalerBase",
            "MIN_LOSS_SCALE",
            "SCALE_WINDOW",
        ),
        left_out("float(value)", "to_python_float"),
        left_out(
            INTERNAL,
            "LossScaleProfile LossScaleProfileDefaults LOSS_SCALE_PROFILE_DEFAULTS LossScaleConfig",
        ),
    ),
    module(
        "deepspeed.runtime.hybrid_engine",
        "Training and generation in turns.",
        classes_not_built(GENERATE, "DeepSpeedHybridEngine"),
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
        names(f"{HERE}.schedule_names", *CONSTANTS),
        names(
            f"{HERE}.schedule_arguments",
            "add_tuning_arguments",
            "get_config_from_args",
            "get_lr_from_config",
            "parse_arguments",
            "update_lr",
        ),
        left_out(
            "get_config_from_args reads the arguments",
            "override_params override_1cycle_params override_lr_range_test_params "
            "override_warmupLR_params override_warmupCosineLR_params",
        ),
        left_out(OWN_OPTIMIZER, "get_torch_optimizer"),
    ),
    module(
        "deepspeed.runtime.pipe",
        "Pipeline parallelism.",
        classes_not_built(NO_PIPELINE, "PipelineModule LayerSpec TiedLayerSpec ProcessTopology"),
    ),
    module(
        "deepspeed.runtime.pipe.engine",
        "Its engine.",
        classes_not_built(NO_PIPELINE, "PipelineEngine"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.pipe.module",
        "Its layers.",
        classes_not_built(NO_PIPELINE, "PipelineModule LayerSpec TiedLayerSpec PipelineError"),
    ),
    module(
        "deepspeed.runtime.pipe.topology",
        "Its ranks.",
        classes_not_built(
            NO_PIPELINE,
            "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology "
            "PipelineParallelGrid",
        ),
    ),
    module("deepspeed.runtime.sequence_parallel", "Sequence parallelism."),
    module(
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "Sequence parallelism by attention heads.",
        classes_not_built(
            NO_SEQUENCE_PARALLEL, "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"
        ),
        classes_not_built(
            "use `kernels` of the configuration, whose loss never holds all logits",
            "SequenceTiledCompute TiledMLP TiledFusedLogitsLoss AutogradComputeMLP",
        ),
        functions_not_built(NO_SEQUENCE_PARALLEL, "sequence_tiled_compute"),
    ),
    module(
        "deepspeed.sequence",
        "Sequence parallelism.",
        left_out("part of sequence parallelism, which is not built", "*"),
    ),
    module(
        "deepspeed.sequence.layer",
        "Sequence parallelism by attention heads.",
        classes_not_built(NO_SEQUENCE_PARALLEL, "DistributedAttention"),
        left_out(
            INTERNAL,
            "post_all2all pre_all2all_fun apply_rotary_pos_emb uneven_heads_all2all "
            "single_all_to_all register_all_to_all_group",
        ),
    ),
    module(
        "deepspeed.runtime.utils",
        "Small helpers.",
        names(f"{HERE}.rank_logging", "see_memory_usage"),
        names(
            f"{HERE}.runtime_utils",
            "call_to_str",
            "clip_grad_norm_",
            "copy_to_device",
            "empty_cache",
            "ensure_directory_exists",
            "get_global_norm",
            "get_only_unique_item",
            "get_weight_norm",
            "has_inf_or_nan",
            "move_to_device",
            "noop_decorator",
            "partition_balanced",
            "partition_uniform",
            "prefix_sum_inc",
            "set_random_seed",
        ),
        names("contextlib", "nullcontext as noop_context"),
        left_out("use see_memory_usage", "memory_status get_ma_status mem_alloced mem_cached"),
        left_out(
            "use get_accelerator().memory_reserved",
            "torch_memory_reserved torch_max_memory_reserved",
        ),
        left_out(
            "the engine clips and reports norms: gradient_clipping, get_global_grad_norm()",
            "get_flattened_grad_norm get_grad_zeros get_global_norm_of_tensors "
            "clip_tensors_by_global_norm combine_grad_norm_groups get_norm_with_moe_layers "
            "get_norm_with_moe_layers_fast is_invalid_grad_norm CheckOverflow "
            "mask_nan_or_inf_with_val_inplace",
        ),
        left_out("use engine.offload_states", "offload_adam_states reload_adam_states"),
        left_out(
            INTERNAL,
            "DummyOptim filter_empty_parameters is_model_parallel_parameter PartitionedTensor "
            "is_optimized_parameter align_dense_tensors all_gather_into_tensor_dp_groups "
            "all_gather_dp_groups get_tensor_bytes get_checkpoint_folder_size TLinear "
            "get_inactive_params is_transformers_cache compare_tensors_in_structures "
            "maybe_loss_for_backward OutputBackwardHookManager register_output_backward_hooks "
            "check_internal_apis_for_count_used_parameters count_used_parameters_in_backward",
        ),
    ),
    module(
        "deepspeed.runtime.zero",
        "Models in shards: construction, access.",
        ZERO,
        TILED,
        GENERATION,
        left_out(OWN_OPTIMIZER, "DeepSpeedZeRoOffload"),
    ),
    module(
        "deepspeed.runtime.zero.config",
        "The section zero_optimization.",
        names(f"{HERE}.zero_config", "DeepSpeedZeroConfig", "ZeroStageEnum", "get_zero_config"),
        names(f"{HERE}.zero_config", "ZERO as ZERO_OPTIMIZATION"),
        left_out(BY_CONFIG, "ZERO_FORMAT read_zero_config_deprecated"),
    ),
    module("deepspeed.runtime.zero.offload_config", "Its sections of offloading.", OFFLOAD),
    module(
        "deepspeed.runtime.zero.partition_parameters",
        "Models in shards: construction, access.",
        ZERO,
        names(f"{HERE}.zero_init", "zero_wrapper_for_fp_tensor_constructor"),
        names(f"{HERE}.accelerator", "get_accelerator"),
        names("torch", "arange as _orig_torch_arange"),
        left_out(
            INTERNAL,
            "partitioned_param_data_shape zero_init_context top_level_context "
            "DS_Z3_EAGER_FALLBACK_OWNER_ATTR DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR "
            "DEFAULT_TENSOR_OVERRIDES get_allgather_dtype NoGatherHandle NoGatherCoalescedHandle "
            "print_rank_0 debug_rank0 unregister_external_parameter get_new_tensor_fn_for_dtype "
            "get_all_subclasses free_param reuse_buffers temp_contiguous_tensor empty_buffers "
            "InsertPostInitMethodToModuleSubClasses shutdown_init_context restore_init_context "
            "AllGatherHandle AllGatherCoalescedHandle MultipleAllGatherHandles "
            "AllReduceCoalescedHandle QuantizationInfo CUDAQuantizer",
        ),
    ),
    module(
        "deepspeed.runtime.zero.stage3",
        "Estimates of memory for stage 3.",
        names(
            f"{HERE}.memory_needs",
            "estimate_zero3_model_states_mem_needs",
            "estimate_zero3_model_states_mem_needs_all_cold",
            "estimate_zero3_model_states_mem_needs_all_live",
        ),
        GENERATION,
        left_out(OWN_OPTIMIZER, "DeepSpeedZeroOptimizer_Stage3"),
        left_out(
            INTERNAL,
            "pg_correctness_test OPTIMIZER_SWAP_IN_STATE_TIMER INIT_OPTIMIZER_TIMER "
            "OPTIMIZER_SWAP_OUT_STATE_TIMER OPTIMIZER_STEP_TIMER print_rank_0 input isclose lcm "
            "move_to_cpu IPGBucketZ3 INITIAL_MICRO_STEP_ID model_to_params",
        ),
    ),
    module(
        "deepspeed.runtime.zero.stage_1_and_2",
        "Estimates of memory for stages 1 and 2.",
        names(
            f"{HERE}.memory_needs",
            "estimate_zero2_model_states_mem_needs",
            "estimate_zero2_model_states_mem_needs_all_cold",
            "estimate_zero2_model_states_mem_needs_all_live",
        ),
        left_out(OWN_OPTIMIZER, "DeepSpeedZeroOptimizer"),
        left_out(
            INTERNAL,
            "pg_correctness_test OPTIMIZER_ALLGATHER_TIMER OPTIMIZER_GRADIENTS_TIMER "
            "OPTIMIZER_STEP_TIMER OPTIMIZER_TIMERS INITIAL_MICRO_STEP_ID input "
            "split_half_float_double isclose lcm get_alignment_padding print_rank_msg IPGBucket "
            "GradPartitionBufferGroup model_to_params",
        ),
    ),
    module(
        "deepspeed.runtime.zero.tiling",
        "Linear layers in tiles.",
        TILED,
        names(f"{HERE}.tiled_linear", "split_tensor_along_last_dim"),
    ),
)
