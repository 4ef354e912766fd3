"""The rows of TRL in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

TRL = ">=1.16,<1.17"

SEAMS: tuple[Seam, ...] = (
    Seam(
        target="trl.trainer.sft_trainer:SFTTrainer.compute_loss",
        signature="(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
        wrapper="hf_zero.integrations.transformers.trainer:count_tokens_of_parts",
        versions=TRL,
        why="counts the tokens of one row, padding too, where a rank has parts of sequences, which "
        "have no attention mask",
    ),
)
