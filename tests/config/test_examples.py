"""Configurations as the documentation of DeepSpeed, transformers, Accelerate, TRL and Lightning
has people write them.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_one_item

FP16: dict[str, Any] = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000}
FP16 |= {"initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
# What people write for the Trainer: the optimizer, the schedule and sizes are filled in.
TRAINER = yaml.safe_load("""
bf16: {enabled: auto}
optimizer: {type: AdamW, params: {lr: auto, betas: auto, eps: auto, weight_decay: auto}}
scheduler:
  type: WarmupLR
  params: {warmup_min_lr: auto, warmup_max_lr: auto, warmup_num_steps: auto}
gradient_clipping: auto
steps_per_print: 2000
wall_clock_breakdown: false
train_batch_size: auto
train_micro_batch_size_per_gpu: auto
gradient_accumulation_steps: auto
""")
ZERO = yaml.safe_load("""
1: {stage: 1}
2: {stage: 2, allgather_partitions: true, allgather_bucket_size: 5.0e+8, overlap_comm: true,
    reduce_scatter: true, reduce_bucket_size: 5.0e+8, contiguous_gradients: true,
    round_robin_gradients: true}
3: {stage: 3, overlap_comm: true, contiguous_gradients: true, sub_group_size: 1.0e+9,
    reduce_bucket_size: auto, stage3_prefetch_bucket_size: auto,
    stage3_param_persistence_threshold: auto, stage3_max_live_parameters: 1.0e+9,
    stage3_max_reuse_distance: 1.0e+9, stage3_gather_16bit_weights_on_model_save: true}
""")
# What the Trainer makes of the "auto" values above.
FILLED: dict[str, Any] = yaml.safe_load("""
train_batch_size: 32
train_micro_batch_size_per_gpu: 8
gradient_accumulation_steps: 2
gradient_clipping: 1.0
bf16: {enabled: true}
optimizer:
  type: AdamW
  params: {lr: 5.0e-5, betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: 0.0}
scheduler:
  type: WarmupLR
  params: {warmup_min_lr: 0, warmup_max_lr: 5.0e-5, warmup_num_steps: 10}
zero_optimization:
  reduce_bucket_size: 589824
  stage3_prefetch_bucket_size: 530841
  stage3_param_persistence_threshold: 7680
steps_per_print: .inf
zero_allow_untested_optimizer: true
""")


def trainer_config(stage: int) -> dict[str, Any]:
    return {"fp16": FP16, "zero_optimization": ZERO[stage], **TRAINER}


@in_one_item([1, 2, 3])
def test_a_trainer_configuration_before_and_after_it_is_filled(stage: int) -> None:
    written = trainer_config(stage)
    early = ZeroConfig.from_dict(written, allow_auto=True)
    assert early.stage == stage
    assert early.to_dict() == ZeroConfig.from_dict(early.to_dict(), allow_auto=True).to_dict()
    with pytest.raises(ConfigError, match="still 'auto'"):
        early.resolve(2)
    filled = {**written, **FILLED, "fp16": {**FP16, "enabled": False}}
    filled["zero_optimization"] = {**ZERO[stage], **FILLED["zero_optimization"]}
    config = ZeroConfig.from_dict(filled).resolve(2)
    assert (config.precision, config.gradient_clipping) == ("bf16", 1.0)
    assert config.train_batch_size == 32
    assert config.optimizer is not None and config.optimizer.params["lr"] == 5e-5
    assert config.scheduler is not None and config.scheduler.type == "WarmupLR"


ACCEPTED: dict[str, dict[str, Any]] = yaml.safe_load("""
communication:
  {communication_data_type: fp32, prescale_gradients: false, gradient_predivide_factor: 1.0}
sections that are off:
  tensor_parallel: {autotp_size: 1}
  sequence_parallel_size: 1
  compression_training:
    weight_quantization: {shared_parameters: {enabled: false}, different_groups: {}}
activation checkpointing:
  activation_checkpointing:
    {partition_activations: true, cpu_checkpointing: false, contiguous_memory_optimization: true,
     number_checkpoints: null, synchronize_checkpoint_boundary: false, profile: false}
offload that is off:
  zero_optimization:
    stage: 3
    offload_optimizer: {device: none, nvme_path: null}
    offload_param: {device: none, nvme_path: null, pin_memory: true, buffer_count: 5,
      buffer_size: 1.0e+8, max_in_cpu: 1.0e+9}
zero++ that is off:
  zero_optimization: {stage: 3, zero_hpz_partition_size: 1, zero_quantized_weights: false,
    zero_quantized_gradients: false, mics_shard_size: -1, mics_hierarchical_params_gather: false}
checkpoint:
  checkpoint: {tag_validation: Warn, load_universal: false, use_node_local_storage: false,
    parallel_write: {pipeline_stage: false}}
the bing recipe of 2020:
  train_batch_size: 64
  train_micro_batch_size_per_gpu: 3
  steps_per_print: 10
  optimizer: {type: Adam, params: {lr: 4.0e-5, weight_decay: 0.0, bias_correction: false}}
  gradient_clipping: 1.0
  disable_allgather: false
  fp32_allreduce: false
  sparse_gradients: false
  dump_state: false
  vocabulary_size: 30528
  fp16: {enabled: true, loss_scale: 0, hysteresis: 2}
""")
FEATURES = (
    "autotuning comms_logger csv_monitor curriculum_learning data_efficiency eigenvalue "
    "elasticity expert_parallel flops_profiler hybrid_engine monitor msamp nebula "
    "progressive_layer_drop sparse_attention tensorboard torch_autocast wandb compile amp"
)
ACCEPTED["every feature off"] = {name: {"enabled": False} for name in FEATURES.split()}


@in_one_item(ACCEPTED)
def test_accepted(name: str) -> None:
    config = ZeroConfig.from_dict(ACCEPTED[name])
    assert ZeroConfig.from_dict(config.to_dict()) == config
    assert not config.autos
