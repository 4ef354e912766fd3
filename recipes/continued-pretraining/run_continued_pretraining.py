"""Train a causal language model further on text packed into full rows, with TRL's SFTTrainer.

accelerate launch --config_file cpu.yaml run_continued_pretraining.py
accelerate launch --config_file 8_gpus.yaml run_continued_pretraining.py --max_length 4096 \
    --model_name_or_path Qwen/Qwen2.5-7B --dataset_name wikimedia/wikipedia \
    --dataset_config 20231101.simple
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
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


def texts() -> list[dict[str, Any]]:
    return [{"text": text} for _, text in paragraphs()]


def main() -> None:
    parser = TrlParser((ScriptArguments, ModelConfig, SFTConfig))
    parser.set_defaults(
        **DEFAULTS, output_dir="runs/continued-pretraining", learning_rate=3e-3, max_length=128,
        packing=True,
        packing_strategy="wrapped",  # every row is full; texts follow each other after </s>
        warmup_steps=5, lr_scheduler_type="cosine",
        lora_target_modules=["all-linear"], dtype=None,  # as the checkpoint has it
    )  # fmt: skip
    data, names, args = parse_arguments(parser)
    splits = (data.dataset_train_split, data.dataset_test_split)
    train, test = load_data(data.dataset_name, data.dataset_config, texts, splits)
    model, tokenizer = load_causal(names.model_name_or_path, **options_of(names, args))
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=get_peft_config(names),
        callbacks=[
            Measured(
                "continued-pretraining", {"eval_loss": "held-out loss", "loss": "training loss"}
            )
        ],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
