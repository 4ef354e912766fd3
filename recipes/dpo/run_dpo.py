"""Teach a causal language model which of two answers is preferred, with TRL's DPOTrainer.

accelerate launch --config_file cpu.yaml run_dpo.py
accelerate launch --config_file 8_gpus.yaml run_dpo.py \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/ultrafeedback_binarized
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
except ModuleNotFoundError as error:
    sys.exit(f"{error}: this recipe needs pip install 'hf-zero[trl]'")

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import (
    DEFAULTS,
    Measured,
    load_causal,
    load_data,
    options_of,
    paragraphs,
    parse_arguments,
)


def preferences() -> list[dict[str, Any]]:
    """Answers in ordinary letters, which are preferred to the same ones in capitals."""
    return [
        {
            "prompt": f"What is said about {name}?\n",
            "chosen": text[:80],
            "rejected": text[:80].upper(),
        }
        for name, text in paragraphs()[:600]
    ]


def main() -> None:
    parser = TrlParser((ScriptArguments, ModelConfig, DPOConfig))
    parser.set_defaults(
        **DEFAULTS, output_dir="runs/dpo", learning_rate=1e-4, max_length=160,
        lora_target_modules=["all-linear"], dtype=None,  # as the checkpoint has it
    )  # fmt: skip
    data, names, args = parse_arguments(parser)
    splits = (data.dataset_train_split, data.dataset_test_split)
    train, test = load_data(data.dataset_name, data.dataset_config, preferences, splits)
    options = options_of(names, args)
    model, tokenizer = load_causal(names.model_name_or_path, **options)
    adapters = get_peft_config(names)  # None without --use_peft
    trainer = DPOTrainer(
        model=model,
        # with adapters, the model without them is the reference
        ref_model=None if adapters else load_causal(names.model_name_or_path, **options)[0],
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[Measured("dpo", {"eval_loss": "held-out loss", "loss": "training loss"})],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    figures = trainer.evaluate()
    if trainer.is_world_process_zero():
        right = figures["eval_rewards/accuracies"]
        print(f"the chosen answer is preferred in {right:.1%} of the held-out pairs")


if __name__ == "__main__":
    main()
