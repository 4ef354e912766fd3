"""``deepspeed.runtime.zero``: sharded models, their configuration, estimates of memory."""

from __future__ import annotations

from hf_zero.deepspeed.rows import (
    Row,
    classes_not_built,
    left_out,
    module,
    names,
)
from hf_zero.deepspeed.tables import (
    BY_CONFIG,
    GATHERED,
    INTERNAL,
    OWN_OPTIMIZER,
    QUANTIZED,
)

ZERO: tuple[Row, ...] = (
    *names("hf_zero.zero.access.full", "GatheredParameters"),
    *names("hf_zero.zero.layout.parameter", "ZeroParamStatus"),
    *names(".zero_init", "Init register_external_parameter"),
    *left_out("all parameters are of this rank: there are no remote ones", "ZeroParamType"),
    *left_out("tensor constructors are left alone", "DeepSpeedTensorOverride"),
)
TILED = names(".layers", "TiledLinear TiledLinearReturnBias")
GENERATION = names(".zero_init", "unwrap_model_for_generation")
OFFLOAD = names(
    ".zero_config",
    "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
    "OffloadDeviceEnum OffloadStateTypeEnum",
)

ZERO_ROWS = (
    module(
        "deepspeed.runtime.zero",
        "Models in shards: construction, access.",
        ZERO,
        TILED,
        GENERATION,
        classes_not_built(OWN_OPTIMIZER, "DeepSpeedZeRoOffload"),
    ),
    module(
        "deepspeed.runtime.zero.config",
        "The section zero_optimization.",
        names(".zero_config", "DeepSpeedZeroConfig ZeroStageEnum"),
        names(".zero_config", "ZERO_OPTIMIZATION=ZERO"),
        OFFLOAD,
        left_out(BY_CONFIG, "ZERO_FORMAT get_zero_config read_zero_config_deprecated"),
    ),
    module(
        "deepspeed.runtime.zero.leaf_module_config",
        "Its section of modules that are gathered whole.",
        names(
            ".zero_config",
            "DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES "
            "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        ),
        classes_not_built(
            "write zero_optimization.leaf_module in the configuration",
            "DeepSpeedZeroLeafModuleConfig",
        ),
    ),
    module("deepspeed.runtime.zero.offload_config", "Its sections of offloading.", OFFLOAD),
    module(
        "deepspeed.runtime.zero.parameter_offload",
        "Parameters in shards.",
        classes_not_built(OWN_OPTIMIZER, "DeepSpeedZeRoOffload"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.zero.utils",
        "Errors.",
        names("hf_zero.errors", "ZeRORuntimeException=HfZeroError"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.runtime.zero.partition_parameters",
        "Models in shards: construction, access.",
        ZERO,
        names(".zero_init", "zero_wrapper_for_fp_tensor_constructor"),
        names(".accelerator", "get_accelerator"),
        names("torch", "_orig_torch_arange=arange"),
        names("torch.nn.functional", "zero3_linear_wrap=linear"),
        names(".zero_config", "partitioned_param_data_shape=PARTITIONED_SHAPE"),
        classes_not_built(QUANTIZED, "CUDAQuantizer QuantizationInfo"),
        classes_not_built(GATHERED, "MultipleAllGatherHandles AllGatherHandle"),
        left_out(
            INTERNAL,
            "zero_init_context top_level_context DS_Z3_EAGER_FALLBACK_OWNER_ATTR "
            "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR DEFAULT_TENSOR_OVERRIDES "
            "get_allgather_dtype NoGatherHandle NoGatherCoalescedHandle print_rank_0 "
            "debug_rank0 unregister_external_parameter get_new_tensor_fn_for_dtype "
            "get_all_subclasses free_param reuse_buffers temp_contiguous_tensor empty_buffers "
            "InsertPostInitMethodToModuleSubClasses shutdown_init_context restore_init_context "
            "AllGatherCoalescedHandle AllReduceCoalescedHandle",
        ),
    ),
    module(
        "deepspeed.runtime.zero.stage3",
        "Estimates of memory for stage 3.",
        names(
            ".memory_needs",
            "estimate_zero3_model_states_mem_needs "
            "estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live",
        ),
        GENERATION,
        classes_not_built(OWN_OPTIMIZER, "DeepSpeedZeroOptimizer_Stage3"),
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
            ".memory_needs",
            "estimate_zero2_model_states_mem_needs "
            "estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live",
        ),
        classes_not_built(OWN_OPTIMIZER, "DeepSpeedZeroOptimizer"),
        left_out(
            INTERNAL,
            "pg_correctness_test OPTIMIZER_ALLGATHER_TIMER OPTIMIZER_GRADIENTS_TIMER "
            "OPTIMIZER_STEP_TIMER OPTIMIZER_TIMERS INITIAL_MICRO_STEP_ID input "
            "split_half_float_double isclose lcm get_alignment_padding print_rank_msg IPGBucket "
            "GradPartitionBufferGroup model_to_params",
        ),
    ),
    module(
        "deepspeed.runtime.zero.linear",
        "Linear layers: torch's, which keep no whole weights.",
        names("torch.nn", "LinearModuleForZeroStage3=Linear"),
        names("torch.nn.functional", "zero3_linear_wrap=linear"),
        left_out(INTERNAL, "*"),
    ),
    module("deepspeed.runtime.zero.muon", "Muon."),
    module(
        "deepspeed.runtime.zero.muon.original_muon",
        "The update of Muon.",
        left_out("write optimizer.type Muon: hf_zero.optim.muon", "*"),
    ),
    module(
        "deepspeed.runtime.zero.tiling",
        "Linear layers in tiles.",
        TILED,
        left_out("use torch.split", "split_tensor_along_last_dim"),
    ),
)
