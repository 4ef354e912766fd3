"""Configurations as the documentation of DeepSpeed, transformers, Accelerate, TRL and Lightning
has people write them.
"""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError

FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}

ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}

# What the Trainer makes of the "auto" values of the two configurations below.
FILLED: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {**FP16, "enabled": False},
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10},
    },
    "zero_optimization": {
        "reduce_bucket_size": 768 * 768,
        "stage3_prefetch_bucket_size": int(0.9 * 768 * 768),
        "stage3_param_persistence_threshold": 7680,
    },
}


def trainer_config(zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "fp16": FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": zero,
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        **BATCH,
    }


@pytest.mark.parametrize("zero", [ZERO2, ZERO3, {"stage": 1}], ids=["zero2", "zero3", "zero1"])
def test_a_trainer_configuration_before_and_after_it_is_filled(zero: dict[str, Any]) -> None:
    written = trainer_config(zero)
    early = ZeroConfig.from_dict(written, allow_auto=True)
    assert early.stage == zero["stage"]
    assert early.to_dict() == ZeroConfig.from_dict(early.to_dict(), allow_auto=True).to_dict()
    with pytest.raises(ConfigError, match="still 'auto'"):
        early.resolve(2)
    filled = {
        **written,
        **FILLED,
        "zero_optimization": {**zero, **FILLED["zero_optimization"]},
        "steps_per_print": float("inf"),
    }
    config = ZeroConfig.from_dict({**filled, "zero_allow_untested_optimizer": True}).resolve(2)
    assert (config.precision, config.gradient_clipping, config.train_batch_size) == (
        "bf16",
        1.0,
        32,
    )
    assert config.optimizer is not None and config.optimizer.params["lr"] == 5e-5
    assert config.scheduler is not None and config.scheduler.type == "WarmupLR"


ACCEPTED: dict[str, dict[str, Any]] = {
    "no mixed precision": {"fp16": {"enabled": False}},
    "apex off": {"amp": {"enabled": False, "opt_level": "O1"}},
    "communication": {
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
    },
    "accumulation dtype": {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}},
    "every feature off": {
        **{
            section: {"enabled": False}
            for section in [
                "autotuning",
                "comms_logger",
                "csv_monitor",
                "curriculum_learning",
                "data_efficiency",
                "eigenvalue",
                "elasticity",
                "expert_parallel",
                "flops_profiler",
                "hybrid_engine",
                "monitor",
                "msamp",
                "nebula",
                "progressive_layer_drop",
                "sparse_attention",
                "tensorboard",
                "torch_autocast",
                "wandb",
                "compile",
                "amp",
            ]
        },
        "tensor_parallel": {"autotp_size": 1},
        "sequence_parallel_size": 1,
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}
        },
    },
    "activation checkpointing": {
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": True,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    },
    "offload that is off": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {
                "device": "none",
                "nvme_path": None,
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        }
    },
    "zero-2 with offload": {
        "zero_optimization": {**ZERO2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    },
    "offload of the first tutorials": {
        "zero_optimization": {
            "stage": 2,
            "cpu_offload": True,
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    "infinity": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
            "aio": {
                "block_size": 262144,
                "queue_depth": 32,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        },
    },
    "zero++ that is off": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "mics_shard_size": -1,
            "mics_hierarchical_params_gather": False,
        }
    },
    "aio": {
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    },
    "checkpoint": {
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        }
    },
    "lightning": {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
    },
    "the bing recipe of 2020": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 3,
        "steps_per_print": 10,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 4e-5, "weight_decay": 0.0, "bias_correction": False},
        },
        "gradient_clipping": 1.0,
        "disable_allgather": False,
        "fp32_allreduce": False,
        "sparse_gradients": False,
        "dump_state": False,
        "vocabulary_size": 30528,
        "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    config = ZeroConfig.from_dict(ACCEPTED[name])
    assert ZeroConfig.from_dict(config.to_dict()) == config
    assert not config.autos


def test_a_reference_model_of_trl_shares_an_unfinished_configuration() -> None:
    written = {
        **trainer_config(ZERO3),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    written |= {
        "optimizer": {"type": None},
        "zero_optimization.reduce_bucket_size": 4096,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 4097,
    }
    config = ZeroConfig.from_dict(written, allow_auto=True).resolve(2, training=False)
    assert (config.stage, config.precision, config.optimizer, config.zero.prefetch_bucket_size) == (
        3,
        "bf16",
        None,
        3687,
    )
