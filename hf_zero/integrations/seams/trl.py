"""The rows of TRL in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

TRL = ">=1.16,<1.17"

SEAMS: tuple[Seam, ...] = (
    Seam(
        target="trl.trainer.base_trainer:_BaseTrainer.create_model_card",
        wrapper="hf_zero.integrations.transformers.run_card:add_run",
        versions=TRL,
        why="writes a card of its own, without calling that of the Trainer",
    ),
    Seam(
        target="trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
        wrapper="hf_zero.integrations.trl.rollout_weights:iter_in_buckets",
        versions=TRL,
        why="gathers a unit for each of its parameters, and the whole model to merge adapters",
    ),
    Seam(
        target="trl.experimental.online_dpo.online_dpo_trainer:"
        "OnlineDPOTrainer._move_model_to_vllm_inner",
        wrapper="hf_zero.integrations.trl.rollout_weights:move_in_buckets",
        versions=TRL,
        why="gathers a unit for each of its parameters, and sends each by itself",
    ),
)
