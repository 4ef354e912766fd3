"""Why tests fail over the facade."""

from __future__ import annotations

import re

# Failures that stay, by the beginning of the test's name, and why.
SCALED = "the engine scales a plain loss.backward() itself: scale() is never needed"
GRAD_FN = (
    "it reads the name and the attributes of DeepSpeed's autograd.Function; zero3_linear_wrap is "
    "torch's own linear"
)
ONE_RANK = "a single rank shards nothing: its parameters are whole, and AVAILABLE"
CUT = "it reads what part of each parameter a rank has (ds_tensor); hf-zero cuts units of several"
COALESCE = "v1/zero/test_zero_coalesce_grad_reduction.py::TestCoalesce"
USER_BACKWARD = "v1/zero/test_zero_user_backward.py::TestZeroUserBackward"
ON_PURPOSE = {
    f"{USER_BACKWARD}WithScale::test_error_when_backward_without_scale": SCALED,
    f"{USER_BACKWARD}ScaleErrorDetection": SCALED,
    "v1/zero/test_zero_user_backward.py::TestUnmanagedGradientAccumulationOverlapCommValidation": (
        "overlap_comm is accepted beside managed_gradient_accumulation: false: at stages 0 and 1 "
        "reductions begin in step() anyway"
    ),
    "runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_zero_stage": (
        "no_sync() works at stages 2 and 3, where DeepSpeed refuses it"
    ),
    "runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_reentry": (
        "no_sync() may stand inside another one, where DeepSpeed refuses it"
    ),
    "runtime/zero/test_zero_context_ancestry.py::TestSerialParamInit": ONE_RANK,
    "runtime/zero/test_zero_hook_attribute_delegation.py": (
        "it reads what DeepSpeed's hooks write on modules; hf-zero's hooks write nothing there"
    ),
    "runtime/zero/test_unwrap_model.py::TestUnwrapModel::": (
        "it reads DeepSpeed's list of hooks; the gathered model is what unwrapping is for, and "
        "whole in both"
    ),
    "v1/zero/test_zero.py::TestIncorectAllgatherBucketSize": (
        "every allgather_bucket_size works, where DeepSpeed refuses odd ones"
    ),
    "v1/zero/test_zero_torch_func.py::TestZero0DirectBackwardStillRaises": (
        "a plain loss.backward() works at stage 0, too"
    ),
    "runtime/zero/test_zero_leaf_module.py::TestSetZ3LeafModule::test_no_grad_input_error": (
        "leaf modules take inputs without gradients, where DeepSpeed raises"
    ),
    "runtime/test_ds_config_dict.py::TestNoModel": (
        "a model may be the first argument of initialize without its name, where DeepSpeed raises"
    ),
    "runtime/test_ds_config_dict.py::test_invalid_gradient_allreduce_op": (
        "refused by a ValueError with a text of its own"
    ),
    "runtime/test_ds_config_dict.py::test_sum_gradient_allreduce_rejects_z": (
        "sums of gradients work at stage 3, too, and beside an empty section zenflow"
    ),
    "runtime/test_ds_initialize.py::TestOptimizerImplementation": (
        "grad_accum_dtype works at stage 0 in every precision, where DeepSpeed refuses some"
    ),
    "v1/zero/test_zero.py::TestZero3ParamPartitioning": (
        "it reads shards and gradients as DeepSpeed's optimizer keeps them (ds_tensor, "
        "averaged_gradients)"
    ),
    "v1/zero/test_zero.py::TestParamPartitioningSkipInit": CUT,
    "v1/zero/test_zero.py::TestZero3InitForParentWeightInitialization": CUT,
    "v1/zero/test_zero.py::TestPartitionNcclAlignment": (
        "it reads the flat buffers of DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "v1/zero/test_zero.py::TestZeroAdamOptimizerStepCount": (
        "it reads the flat buffers of DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "v1/zero/test_zero.py::TestZeroPartitionCache": ONE_RANK,
    "v1/zero/test_zero.py::TestZeroOffloadOptim": (
        "an optimizer of torch works with zero_force_ds_cpu_optimizer, where DeepSpeed refuses it"
    ),
    "v1/zero/test_zero.py::TestBF16OptimizerGradReduction": (
        "it reads a buffer of DeepSpeed's BF16_Optimizer; engine.optimizer is the script's own"
    ),
    "checkpoint/test_zero_optimizer.py::TestZeROCheckpointFrozenWeights::test_save_exclude": (
        "it reads files of DeepSpeed's checkpoints by their names; those of hf-zero are listed in "
        "manifest.json"
    ),
    "checkpoint/test_zero_optimizer.py::test_elastic_checkpoint": (
        "elastic_checkpoint is accepted without a warning: every checkpoint is elastic"
    ),
    "v1/zero/test_zero2_offload_multi_backward.py::": (
        "it reads a buffer of DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "v1/zero/test_stage2_flatten_on_gpu.py::": (
        "it reads a line of DeepSpeed's log and the flat buffers of its optimizers"
    ),
    "ops/muon/test_muon.py::TestMuonZero12NumericalCorrectness": (
        "it reads the partitions of DeepSpeed's optimizer; the suite compares Muon's update of "
        "shards with torch's own"
    ),
    "ops/muon/test_muon.py::TestMuonRejectsReduceScatter": (
        "Muon's matrices are offloaded whatever reduce_scatter says, where DeepSpeed refuses it"
    ),
    "runtime/half_precision/test_fp16.py::TestFP16OptimizerForMoE": (
        "it hands a method to DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "runtime/test_ds_config_dict.py::test_sum_gradient_allreduce_rejects_deepcompile": (
        "DeepCompile is not built: refused by a NotBuiltError"
    ),
    "ops/adam/test_zf_torch_adam.py": (
        "it hands ZenFlow's optimizer what DeepSpeed's engine writes on parameters "
        "(selected_indices, ds_tensor, swappers); offload_optimizer's exact update overlaps the "
        "next forward"
    ),
    "v1/zero/test_zero_cpu_offload_grad_accum.py": (
        "it reads a buffer of DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py": (
        "it reads what DeepSpeed's hooks keep on parameters and modules (is_external_param, "
        "ds_recompute_parameters)"
    ),
    "runtime/zero/test_zero_context.py::test_multiple_all_gather": (
        "it hands its own objects to a handle of DeepSpeed's gathers"
    ),
    "runtime/zero/test_zero_context.py::TestScatterGather": (
        "a parameter without memory keeps its shape, where DeepSpeed's has none"
    ),
    "runtime/zero/test_zero_context.py::TestZeroGatheredParametersFree": ONE_RANK,
    "runtime/zero/test_zero_context.py::TestMiCSGatheredParametersFree": ONE_RANK,
    "runtime/zero/test_zero_context.py::TestSerialContext::test_subclass_param": ONE_RANK,
    "runtime/zero/test_zero_context.py::TestSerialContext::test_scatter_halftype": (
        "it reads ds_tensor of a parameter on one rank, which shards nothing and keeps its dtype"
    ),
    "runtime/zero/test_zeropp.py::test_cuda_quantizer": (
        "it hands a stand-in to DeepSpeed's quantizer; hf_zero.ops has kernels of its own"
    ),
    "runtime/zero/test_zeropp.py::test_zero_hpz_s": (
        "it hands an object of its own to a private method of DeepSpeed's Init"
    ),
    "linear/test_ctx.py": "deepspeed.linear is not built: refused by a NotBuiltError",
    "v1/zero/test_zero_coalesce_grad_reduction.py::TestCoalesceCollectiveCount": (
        "it reads calls of DeepSpeed's comm functions; the engine's collectives are its own"
    ),
    f"{COALESCE}DocumentedBehaviors::test_engine_boundary": (
        "it reads _is_gradient_accumulation_boundary, a field of DeepSpeed's engine"
    ),
    f"{COALESCE}DocumentedBehaviors::test_safe_get_full_grad": (
        "param.grad of a gradient that the engine holds is an error, which names safe_get_full_grad"
    ),
    f"{COALESCE}Zero3MicroStepInvariant": (
        "it reads micro_step_id and a private method of DeepSpeed's optimizer"
    ),
    f"{COALESCE}FailureModes::test_existing_no_sync": (
        "no_sync() works at stages 2 and 3, where DeepSpeed refuses it"
    ),
    f"{COALESCE}FailureModes::test_nested_no_sync_outer": (
        "no_sync() may stand inside another one, where DeepSpeed refuses it"
    ),
    f"{COALESCE}FailureModes::test_pipeline": (
        "it reads pipeline_parallelism, a field of DeepSpeed's engine that it sets itself"
    ),
    f"{COALESCE}GradAccumDtype::test_zero1_no_offload": (
        "grad_accum_dtype works with coalesced reductions, where DeepSpeed refuses it"
    ),
    "runtime/test_lr_schedulers.py::test_warmup_cosine_lr_unknown": (
        "an unknown warmup_type is refused, where DeepSpeed takes the logarithmic one"
    ),
    "ops/adam/test_cpu_adam.py::test_zenflow": (
        "it hands gradients to ZenFlow's optimizer in another process; it is not built"
    ),
    "v1/accelerator/test_accelerator.py": (
        "it reads the files of DeepSpeed's package of accelerators; the facade's modules are none"
    ),
    "v1/zero/test_zero_functorch_linear.py::TestZeroFunctorchLinearRegression": GRAD_FN,
    "v1/zero/test_zero_functorch_linear.py::TestZeroLinearAutocast::test_setup_context": GRAD_FN,
}
WORKS_HERE = "on purpose: works here, where DeepSpeed refuses it"
KEPT = "on purpose: reads what DeepSpeed's implementation keeps"
# What a failure is about, by what was said; the first that fits.
REASONS = {
    WORKS_HERE: (r"on purpose: .*(DeepSpeed (raises|refuses)|\bworks?\b|accepted|never needed)"),
    KEPT: r"on purpose: it (reads|hands)",
    "on purpose: otherwise here": r"on purpose:",
    "a feature that is not built": r"NotBuiltError",
    "imports a module or name of DeepSpeed's implementation": r"ImportError|ModuleNotFoundError",
    "uses an attribute of DeepSpeed's implementation": (
        r"AttributeError: .*no attribute|AttributeError: _|internal to DeepSpeed|isinstance\("
    ),
    "something else": r"",
}


def on_purpose(name: str) -> str:
    """Why the failure of a test stays; "" if it does not."""
    found = (why for start, why in ON_PURPOSE.items() if name.startswith(start))
    return "".join(f"on purpose: {why}" for why in found)


def about_what(said: str) -> str:
    """Return the one of REASONS that matches ``said``."""
    return next(reason for reason, pattern in REASONS.items() if re.search(pattern, said))
