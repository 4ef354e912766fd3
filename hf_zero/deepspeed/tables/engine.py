"""Names of DeepSpeed's engine that are missing here, and what to do instead: no published script,
no library of Hugging Face and no passing test of DeepSpeed asks for them.
"""

from __future__ import annotations

from hf_zero.deepspeed.rows import left_out

ENGINE_LEFT_OUT: dict[str, str] = {
    row.name: row.reason
    for row in (
        *left_out(
            "a setting: engine.config.to_dict() has the written ones",
            "aio_config autotuning_enabled bf16_master_weights_and_gradients "
            "bf16_optimizer_states checkpoint_serialization_enabled "
            "checkpoint_tag_validation_enabled checkpoint_tag_validation_fail "
            "checkpoint_writer_enabled curriculum_enabled_legacy curriculum_learning_config "
            "curriculum_params_legacy data_efficiency_config data_efficiency_enabled "
            "data_sampling_config data_sampling_enabled dataloader_drop_last dump_state "
            "dynamic_loss_scale_args flops_profiler_detailed flops_profiler_enabled "
            "flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step "
            "flops_profiler_recompute_fwd_factor flops_profiler_top_modules fp16_auto_cast "
            "fp16_master_weights_and_gradients gradient_average gradient_predivide_factor "
            "initial_dynamic_scale is_deepcompile_active is_deepcompile_enabled "
            "is_first_weights_partition_group is_sanity_checks_enabled "
            "load_universal_checkpoint memory_breakdown optimizer_legacy_fusion "
            "optimizer_params pld_enabled pld_gamma pld_params pld_theta postscale_gradients "
            "random_ltd_config scheduler_name scheduler_params super_offload swap_tensor_config "
            "torch_autocast_dtype torch_autocast_enabled use_node_local_storage "
            "zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential "
            "zero_allow_untested_optimizer zero_compute_grad_norm zero_contiguous_gradients "
            "zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_hpz_partition_size "
            "zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights "
            "zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance "
            "zero_model_persistence_threshold zero_module_granularity_threshold "
            "zero_multi_rank_bucket_allreduce zero_nvme_offload_optimizer zero_overlap_comm "
            "zero_param_persistence_threshold zero_partial_offload zero_prefetch_bucket_size "
            "zero_quantized_gradients zero_quantized_nontrainable_weights "
            "zero_quantized_weights zero_reduce_bucket_size zero_reduce_scatter "
            "zero_round_robin_gradients zero_sub_group_size",
        ),
        *left_out(
            "the engine clips and reports norms: gradient_clipping, get_global_grad_norm()",
            "clip_fp32_gradients",
        ),
        *left_out(
            "the engine reduces units by itself; allreduce_gradients() reduces what is unreduced",
            "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain "
            "buffered_allreduce_fallback sparse_all_gather sparse_allreduce "
            "sparse_allreduce_bucket sparse_allreduce_no_retain",
        ),
        *left_out(
            "a part of autotuning; `hf-zero estimate --fit` proposes a configuration",
            "autotuning_end_profile_step autotuning_metric autotuning_metric_path "
            "autotuning_model_info_path autotuning_profile_model_info "
            "autotuning_start_profile_step",
        ),
        *left_out(
            "a part of DeepCompile; write compile: blocks in the configuration",
            "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend "
            "get_autotp_backend get_compile_time get_deepcompile_backend "
            "get_deepspeed_compile_backend is_compiled register_compile_pass "
            "uses_parallelization_pass_only",
        ),
        *left_out(
            "Python's own collector is left alone",
            "collect_python_gc",
        ),
        *left_out(
            "a part of SuperOffload; offload_optimizer updates beside the training",
            "cpuadam_cores_perc",
        ),
        *left_out(
            "train_batch_size(), train_micro_batch_size_per_gpu(), gradient_accumulation_steps()",
            "get_batch_info",
        ),
        *left_out(
            "the optimizer is configured in hf_zero.optim.build",
            "get_optimizer_configuration",
        ),
        *left_out(
            "get_model_parallel_rank()",
            "get_tensor_parallel_rank",
        ),
        *left_out(
            "read the groups of engine.optimizer",
            "get_type",
        ),
        *left_out(
            "isinstance with the classes of torch.utils.data",
            "is_iterable_style_dataset is_map_style_dataset",
        ),
        *left_out(
            "load_state_dict takes whole weights; load_checkpoint reads checkpoints",
            "load_module_state_dict",
        ),
        *left_out(
            "experts are parameters like others: load_checkpoint loads them",
            "load_moe_state_dict",
        ),
        *left_out(
            "MoE layers of DeepSpeed's are not built",
            "print_forward_breakdown",
        ),
        *left_out(
            "the engine draws tokens by its configuration alone",
            "random_ltd_initialize",
        ),
        *left_out(
            "read engine.config.tensor_parallel",
            "tensor_parallel_config",
        ),
        *left_out(
            "torch.autocast knows which operations are safe",
            "torch_autocast_lower_precision_safe_modules",
        ),
        *left_out(
            "offload the optimizer: its update overlaps the next forward",
            "zenflow_config",
        ),
        *left_out(
            "alignment is the layout's own",
            "zero_parameter_alignment",
        ),
        *left_out(
            "Muon keeps its momentum on the device",
            "zero_save_muon_momentum_buffer_in_memory",
        ),
    )
}
