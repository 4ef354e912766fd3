"""The rows of PEFT in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

PEFT = ">=0.21,<0.22"

SEAMS: tuple[Seam, ...] = (
    Seam(
        target="peft.tuners.trainable_tokens.layer:TrainableTokensLayer._collect_token_weights",
        wrapper="hf_zero.integrations.peft.adapters:read_token_rows",
        versions=PEFT,
        why="asks torch for the current CUDA device under ZeRO-3, and sends "
        "rows that every rank has",
    ),
    Seam(
        target="peft.utils.save_and_load:get_peft_model_state_dict",
        wrapper="hf_zero.integrations.peft.adapters:read_state_dict",
        versions=PEFT,
        why="rank 0 saves alone, and would gather modules that are saved whole and prompt "
        "encoders; other ranks look up keys in {}",
    ),
    Seam(
        target="peft.peft_model:PeftModel.save_pretrained",
        wrapper="hf_zero.integrations.peft.adapters:leave_files_to_rank_0",
        versions=PEFT,
        why="ranks without the weights would write an empty adapter over that of rank 0",
    ),
)
