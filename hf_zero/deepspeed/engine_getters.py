"""The configuration getters of DeepSpeed's engine, as a table; and its methods that are not built,
or have no counterpart here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config.techniques import CURRICULUM, EFFICIENCY, LEGACY, SAMPLING, TOKEN_DROP
from hf_zero.deepspeed.placeholders import function
from hf_zero.deepspeed.zero_config import DEFAULTS, ZERO
from hf_zero.techniques.layer_drop import LayerDrop

GETTERS: dict[str, tuple[str, Any]] = {
    "aio_config": ("aio", {}),
    "autotp_size": ("tensor_parallel.autotp_size", 0),
    "checkpoint_tag_validation_enabled": ("checkpoint.tag_validation", "Warn"),
    "curriculum_enabled_legacy": (f"{LEGACY}.enabled", False),
    "curriculum_params_legacy": (LEGACY, {}),
    "curriculum_learning_config": (CURRICULUM, {"enabled": False}),
    "curriculum_learning_enabled": (f"{CURRICULUM}.enabled", False),
    "data_efficiency_config": (EFFICIENCY, {"enabled": False}),
    "data_efficiency_enabled": (f"{EFFICIENCY}.enabled", False),
    "data_sampling_config": (SAMPLING, {"enabled": False}),
    "data_sampling_enabled": (f"{SAMPLING}.enabled", False),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "dump_state": ("dump_state", False),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "memory_breakdown": ("memory_breakdown", False),
    "optimizer_params": ("optimizer.params", None),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "pld_gamma": ("progressive_layer_drop.gamma", 0.001),
    "pld_params": ("progressive_layer_drop", {}),
    "pld_theta": ("progressive_layer_drop.theta", 0.5),
    "random_ltd_config": (TOKEN_DROP, {}),
    "random_ltd_enabled": (f"{TOKEN_DROP}.enabled", False),
    "scheduler_params": ("scheduler.params", None),
    "steps_per_print": ("steps_per_print", None),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "zero_allgather_bucket_size": (f"{ZERO}.allgather_bucket_size", 500_000_000),
    "zero_allgather_partitions": (f"{ZERO}.allgather_partitions", True),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_contiguous_gradients": (f"{ZERO}.contiguous_gradients", True),
    "zero_elastic_checkpoint": (f"{ZERO}.elastic_checkpoint", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", False),
    "zero_hpz_partition_size": (f"{ZERO}.zero_hpz_partition_size", 1),
    "zero_ignore_unused_parameters": (f"{ZERO}.ignore_unused_parameters", True),
    "zero_legacy_stage1": (f"{ZERO}.legacy_stage1", False),
    "zero_load_from_fp32_weights": (f"{ZERO}.load_from_fp32_weights", True),
    "zero_max_live_parameters": (f"{ZERO}.stage3_max_live_parameters", None),
    "zero_max_reuse_distance": (f"{ZERO}.stage3_max_reuse_distance", 1_000_000_000),
    "zero_model_persistence_threshold": (
        f"{ZERO}.stage3_model_persistence_threshold",
        DEFAULTS["stage3_model_persistence_threshold"],
    ),
    "zero_module_granularity_threshold": (f"{ZERO}.stage3_module_granularity_threshold", 0),
    "zero_multi_rank_bucket_allreduce": (f"{ZERO}.use_multi_rank_bucket_allreduce", True),
    "zero_offload_optimizer": (f"{ZERO}.offload_optimizer", None),
    "zero_offload_param": (f"{ZERO}.offload_param", None),
    "zero_overlap_comm": (f"{ZERO}.overlap_comm", True),
    "zero_param_persistence_threshold": (
        f"{ZERO}.stage3_param_persistence_threshold",
        DEFAULTS["stage3_param_persistence_threshold"],
    ),
    "zero_prefetch_bucket_size": (f"{ZERO}.stage3_prefetch_bucket_size", 50_000_000),
    "zero_quantized_gradients": (f"{ZERO}.zero_quantized_gradients", False),
    "zero_quantized_nontrainable_weights": (
        f"{ZERO}.zero_quantized_nontrainable_weights",
        False,
    ),
    "zero_quantized_weights": (f"{ZERO}.zero_quantized_weights", False),
    "zero_reduce_bucket_size": (f"{ZERO}.reduce_bucket_size", 500_000_000),
    "zero_reduce_scatter": (f"{ZERO}.reduce_scatter", True),
    "zero_round_robin_gradients": (f"{ZERO}.round_robin_gradients", False),
    "zero_sub_group_size": (f"{ZERO}.sub_group_size", 1_000_000_000),
}
"""Methods that return what the configuration says under a key: (its path, its default)."""

CONSTANTS: dict[str, Any] = {
    "autotuning_enabled": False,
    "is_deepcompile_active": False,
    "is_deepcompile_enabled": False,
    "is_sanity_checks_enabled": True,
    "optimizer_legacy_fusion": False,
    "super_offload": False,
    "swap_tensor_config": None,
    "zero_allgather_sequential": False,
    "zero_compute_grad_norm": True,
    "zero_log_trace_cache_warnings": False,
    "bf16_master_weights_and_gradients": False,
    "bf16_optimizer_states": False,
    "fp16_master_weights_and_gradients": False,
    "checkpoint_serialization_enabled": True,
    "checkpoint_writer_enabled": False,
}
"""Methods that ask for what this version has not, or always has."""

NOT_BUILT = {
    "clip_fp32_gradients": "write gradient_clipping: step() clips, by the norm over all ranks",
    "get_deepcompile_backend": "write compile: blocks in the configuration",
    "random_ltd_initialize": "the engine draws tokens by its configuration alone",
    "register_compile_pass": "write compile: blocks in the configuration",
    "sparse_allreduce": "sparse gradients are reduced as dense ones",
    "tensor_parallel_config": "read engine.config.tensor_parallel",
    "torch_autocast_lower_precision_safe_modules": "torch.autocast knows which operations are safe",
    "zenflow_config": "offload the optimizer: its update overlaps the next forward",
}
"""Methods that ask for what is not built, and what to do instead."""

_BUCKETS = "the engine reduces units by itself; allreduce_gradients() reduces what is unreduced"
_SETTINGS = "settings of a tool that is not built; its *_enabled() is False"
LEFT_OUT = {
    **dict.fromkeys(
        (
            "all_gather_scalar",
            "allreduce_and_copy",
            "allreduce_bucket",
            "allreduce_no_retain",
            "buffered_allreduce_fallback",
            "sparse_all_gather",
            "sparse_allreduce_bucket",
            "sparse_allreduce_no_retain",
        ),
        _BUCKETS,
    ),
    **dict.fromkeys(
        (
            "autotuning_end_profile_step",
            "autotuning_metric",
            "autotuning_metric_path",
            "autotuning_model_info_path",
            "autotuning_profile_model_info",
            "autotuning_start_profile_step",
        ),
        _SETTINGS,
    ),
    **dict.fromkeys(
        (
            "compile_autosp",
            "compile_autotp",
            "compile_zero_optimization_stage",
            "get_autosp_backend",
            "get_autotp_backend",
            "get_compile_time",
            "get_deepspeed_compile_backend",
            "uses_parallelization_pass_only",
        ),
        "part of DeepCompile, which is not built; is_deepcompile_enabled() is False",
    ),
    "collect_python_gc": "Python's own collector is left alone",
    "cpuadam_cores_perc": "part of SuperOffload, which is not built; super_offload() is False",
    "get_optimizer_configuration": "the optimizer is configured in hf_zero.optim.build",
    "load_moe_state_dict": "experts are parameters like others: load_checkpoint loads them",
    "print_forward_breakdown": "MoE layers of DeepSpeed's are not built",
    "zero_parameter_alignment": "alignment is the layout's own",
    "zero_save_muon_momentum_buffer_in_memory": "Muon keeps its momentum on the device",
}
"""Public methods of DeepSpeed's engine that there are not, and why."""


def getter(path: str, default: Any) -> Callable[[Any], Any]:
    """Return a method that returns the configuration's value under ``path``."""

    def get(self: Any) -> Any:
        value: Any = self.config.to_dict("default")
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    get.__doc__ = f"``{path}`` of the configuration; {default!r} where it is not written."
    return get


def constant(value: Any) -> Callable[[Any], Any]:
    """Return a method that returns ``value``."""

    def get(self: Any) -> Any:
        return value

    get.__doc__ = f"{value!r} in this version."
    return get


def methods() -> dict[str, Callable[..., Any]]:
    """Return all of the above by name, as methods of the engine's class."""
    made = {name: getter(path, default) for name, (path, default) in GETTERS.items()}
    made |= {name: constant(value) for name, value in CONSTANTS.items()}
    made |= {
        name: function(f"deepspeed.DeepSpeedEngine.{name}", instead)
        for name, instead in NOT_BUILT.items()
    }
    for name, method in made.items():
        method.__name__, method.__qualname__ = name, f"DeepSpeedEngine.{name}"
    return made


# ---- ``engine.progressive_layer_drop`` ----


class ProgressiveLayerDrop:
    """The schedule of layer drop, for scripts; models need not read it to drop their blocks."""

    def __init__(self, technique: LayerDrop):
        self._technique = technique

    def get_theta(self) -> float:
        """Return theta(t) of the next forward: the probability that the last block is kept."""
        return self._technique.theta

    def get_state(self) -> dict[str, Any]:
        """Return the keywords that DeepSpeed's engine passed to a model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}
