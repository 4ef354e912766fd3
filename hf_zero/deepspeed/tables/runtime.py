"""``deepspeed.runtime``: the engine, schedules, loaders, ZeRO; and checkpoints."""

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
    BY_CONFIG,
    CONSTANT,
    FILES,
    GENERATE,
    INTERNAL,
    NO_DUALPIPE,
    NO_SEQUENCE_PARALLEL,
    OWN_OPTIMIZER,
    PIPELINE,
)
from hf_zero.deepspeed.tables.top import CONFIG, CONFIG_ERROR

ACTIVATION_CHECKPOINTING: tuple[Row, ...] = (
    *names(
        ".activation_checkpointing",
        "checkpoint configure is_configured non_reentrant_checkpoint=checkpoint reset "
        "set_num_layers",
    ),
    *names(
        ".activation_checkpointing",
        "CudaRNGStatesTracker=RandomStates get_cuda_rng_tracker "
        "_CUDA_RNG_STATE_TRACKER=_states model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed=model_parallel_cuda_manual_seed",
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
        "partition_activations_in_checkpoint deepspeed_checkpointing_enabled mpu mp_rank "
        "mp_size mp_group num_layers contiguous_data_buffers data_offsets "
        "contiguous_size_buffers size_offsets timers PARTITION_ACTIVATIONS CPU_CHECKPOINT "
        "CONTIGUOUS_CHECKPOINTING SYNCHRONIZE PROFILE_TIME",
    ),
)
OPTIMIZERS = names("torch.optim", "DeepSpeedOptimizer=Optimizer ZeROOptimizer=Optimizer")
ANY_RANKS = "every checkpoint of hf-zero resumes on any number of ranks and at any stage as it is"
ONE_BIT = classes_not_built(
    "name it in the configuration, optimizer.type: OneBitAdam, OneBitLamb or ZeroOneAdam, or take "
    "the class of that name in hf_zero.optim",
    "OnebitAdam OnebitLamb ZeroOneAdam",
    base="torch.optim:Optimizer",
)

CHECKPOINT_ENGINES: tuple[Row, ...] = (
    *names(".checkpoint_files", "CheckpointCommitInfo CheckpointEngine TorchCheckpointEngine"),
    *left_out("engine.save_checkpoint writes; write checkpoint.async_save for another thread", "*"),
)

RUNTIME = (
    module("deepspeed.runtime.checkpoint_engine", "Files of scripts.", CHECKPOINT_ENGINES),
    module(
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine",
        "Their base class.",
        CHECKPOINT_ENGINES,
    ),
    module(
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine",
        "Files of torch.save.",
        CHECKPOINT_ENGINES,
    ),
    module(
        "deepspeed.checkpoint",
        "Checkpoints.",
        names(".zero_config", "UNIVERSAL_CHECKPOINT_INFO"),
        classes_not_built(ANY_RANKS, "DeepSpeedCheckpoint ZeROCheckpoint"),
        left_out(FILES, "*"),
    ),
    module(
        "deepspeed.checkpoint.ds_to_universal",
        "Checkpoints for any number of ranks.",
        names(".state_dicts", "main parse_arguments"),
        left_out(FILES, "*"),
        command=".state_dicts:main",
    ),
    module(
        "deepspeed.checkpoint.utils",
        "State dicts to be saved.",
        names(".state_dicts", "clone_tensors_for_torch_save"),
        functions_not_built(
            "the files of a checkpoint are listed in its manifest.json",
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
            ".zero_config",
            "ADAM_OPTIMIZER LAMB_OPTIMIZER get_gradient_clipping get_log_level",
        ),
        left_out(BY_CONFIG, "*"),
    ),
    module("deepspeed.runtime.comm", "Collectives of several tensors."),
    module(
        "deepspeed.runtime.comm.coalesced_collectives",
        "Collectives of several tensors.",
        names(".runtime_utils", "reduce_scatter_coalesced"),
        functions_not_built(
            "hf-zero reduces in the dtype of communication_data_type",
            "all_to_all_quant_reduce all_to_all_loco_quant_reduce",
        ),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.precision_config",
        "The sections bf16 and fp16 of a configuration.",
        names(
            ".config_model",
            "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config",
        ),
        left_out(CONSTANT, "*"),
    ),
    module(
        "deepspeed.runtime.swap_tensor",
        "State in files.",
        names(".zero_config", "MIN_SWAPPABLE_BYTES"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.config_utils",
        "Parts of configurations.",
        names(".config_model", "DeepSpeedConfigModel"),
        left_out(
            BY_CONFIG,
            "get_config_default pp_int ScientificNotationEncoder DeepSpeedConfigObject "
            "get_scalar_param get_list_param get_dict_param dict_raise_error_on_duplicate_keys",
        ),
    ),
    module(
        "deepspeed.runtime.dataloader",
        "Data loaders: that of initialize(training_data=...) is torch's.",
        names("torch.utils.data", "DeepSpeedDataLoader=DataLoader"),
        names(".runtime_utils", "RepeatingLoader"),
    ),
    module(
        "deepspeed.runtime.engine",
        "The engine.",
        names(".engine", "DeepSpeedEngine"),
        names(".initializing", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"),
        left_out(CONSTANT, "MEMORY_OPT_ALLREDUCE_SIZE CASTABLE_DTYPES"),
        left_out(INTERNAL, "split_half_float_double_sparse EngineTimers"),
    ),
    module(
        "deepspeed.runtime.bf16_optimizer",
        "Training in bf16.",
        classes_not_built(OWN_OPTIMIZER, "BF16_Optimizer"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.constants",
        "Names of keys, and defaults.",
        names(
            ".zero_config",
            "GRADIENT_CLIPPING GRADIENT_CLIPPING_DEFAULT LOG_LEVEL LOG_LEVEL_DEFAULT ROUTE_EVAL",
        ),
        left_out(CONSTANT, "*"),
    ),
    module("deepspeed.runtime.fp16", "Training in fp16."),
    module(
        "deepspeed.runtime.fp16.fused_optimizer",
        "Training in fp16.",
        classes_not_built(OWN_OPTIMIZER, "FP16_Optimizer"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.fp16.unfused_optimizer",
        "Training in fp16.",
        classes_not_built(OWN_OPTIMIZER, "FP16_UnfusedOptimizer"),
    ),
    module("deepspeed.runtime.fp16.onebit", "Optimizers that compress gradients.", ONE_BIT),
    *(
        module(f"deepspeed.runtime.fp16.onebit.{name}", "One of them.", ONE_BIT)
        for name in ("adam", "lamb", "zoadam")
    ),
    module(
        "deepspeed.runtime.fp16.loss_scaler",
        "Loss scales.",
        names(
            ".loss_scalers",
            "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT DynamicLossScaler "
            "INITIAL_LOSS_SCALE LossScaler LossScalerBase MIN_LOSS_SCALE SCALE_WINDOW",
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
            "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        ),
        names(
            ".zero_config",
            "LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR "
            "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
            "LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE DECAY_STEP_SIZE CYCLE_MIN_LR "
            "CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE "
            "WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE "
            "WARMUP_LINEAR_RATE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS",
        ),
        left_out(
            "write the section scheduler in the configuration",
            "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config "
            "update_lr override_params override_1cycle_params override_lr_range_test_params "
            "override_warmupLR_params override_warmupCosineLR_params",
        ),
        left_out(
            CONSTANT,
            "LR_SCHEDULE EDGE_VALUE MID_VALUE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STAIR_COUNT "
            "CYCLE_SECOND_STEP_SIZE",
        ),
        left_out(OWN_OPTIMIZER, "get_torch_optimizer"),
    ),
    module(
        "deepspeed.runtime.pipe",
        "Pipeline parallelism.",
        names(PIPELINE + ".module", "LayerSpec PipelineModule TiedLayerSpec"),
        names(PIPELINE + ".topology", "ProcessTopology"),
    ),
    module(
        "deepspeed.runtime.pipe.engine",
        "Its engine.",
        names(".pipeline", "PipelineEngine"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.pipe.module",
        "Its layers.",
        names(PIPELINE + ".module", "LayerSpec PipelineModule TiedLayerSpec"),
        names("hf_zero.errors", "PipelineError"),
    ),
    module(
        "deepspeed.runtime.pipe.schedule",
        "What each stage does, step by step.",
        names(
            ".pipeline",
            "BackwardPass BufferOpInstruction ForwardPass InferenceSchedule LoadMicroBatch "
            "OptimizerStep=WeightUpdate PipeInstruction PipeSchedule RecvActivation RecvGrad "
            "ReduceGrads ReduceTiedGrads SendActivation SendGrad TrainSchedule",
        ),
        classes_not_built(NO_DUALPIPE, "DualPipeVSchedule"),
        left_out("one stage needs no schedule", "DataParallelSchedule"),
        left_out(INTERNAL, "CommitP2P"),
    ),
    module(
        "deepspeed.runtime.pipe.topology",
        "Its ranks.",
        names(
            PIPELINE + ".topology",
            "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid "
            "ProcessTopology",
        ),
    ),
    module("deepspeed.runtime.sequence_parallel", "Sequence parallelism."),
    module(
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "Sequence parallelism by attention heads.",
        names(".sequence", "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        names(
            ".sequence",
            "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute",
        ),
        left_out("use torch.utils.checkpoint, or TiledMLP", "AutogradComputeMLP"),
    ),
    module(
        "deepspeed.sequence",
        "Sequence parallelism.",
        left_out(NO_SEQUENCE_PARALLEL, "*"),
    ),
    module(
        "deepspeed.sequence.layer",
        "Sequence parallelism by attention heads.",
        names("hf_zero.parallel.sequence.attention", "DistributedAttention"),
        left_out(
            INTERNAL,
            "post_all2all pre_all2all_fun apply_rotary_pos_emb uneven_heads_all2all "
            "single_all_to_all register_all_to_all_group",
        ),
    ),
    module(
        "deepspeed.runtime.utils",
        "Small helpers.",
        names(".logs", "see_memory_usage"),
        names(
            ".runtime_utils",
            "CheckOverflow call_to_str clip_grad_norm_ get_weight_norm has_inf_or_nan "
            "move_to_device prefix_sum_inc",
        ),
        names(PIPELINE + ".module", "partition_balanced partition_uniform set_random_seed"),
        names(".runtime_utils", "PartitionedTensor"),
        names("contextlib", "noop_context=nullcontext"),
        left_out("use move_to_device", "copy_to_device"),
        left_out("use get_accelerator().empty_cache", "empty_cache"),
        left_out("use os.makedirs", "ensure_directory_exists"),
        left_out("use see_memory_usage", "memory_status get_ma_status mem_alloced mem_cached"),
        left_out(
            "use get_accelerator().memory_reserved",
            "torch_memory_reserved torch_max_memory_reserved",
        ),
        left_out(
            "the engine clips and reports norms: gradient_clipping, get_global_grad_norm()",
            "get_global_norm get_flattened_grad_norm get_grad_zeros get_global_norm_of_tensors "
            "clip_tensors_by_global_norm combine_grad_norm_groups get_norm_with_moe_layers "
            "get_norm_with_moe_layers_fast is_invalid_grad_norm "
            "mask_nan_or_inf_with_val_inplace",
        ),
        left_out("use engine.offload_states", "offload_adam_states reload_adam_states"),
        left_out(
            INTERNAL,
            "get_only_unique_item noop_decorator DummyOptim filter_empty_parameters "
            "is_model_parallel_parameter is_optimized_parameter align_dense_tensors "
            "all_gather_into_tensor_dp_groups all_gather_dp_groups get_tensor_bytes "
            "get_checkpoint_folder_size TLinear get_inactive_params is_transformers_cache "
            "compare_tensors_in_structures maybe_loss_for_backward OutputBackwardHookManager "
            "register_output_backward_hooks check_internal_apis_for_count_used_parameters "
            "count_used_parameters_in_backward",
        ),
    ),
)
