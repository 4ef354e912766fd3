"""Fine-tune a causal language model with LoRA on instructions, with TRL's SFTTrainer and PEFT.

accelerate launch --config_file cpu.yaml run_sft_lora.py
accelerate launch --config_file 8_gpus.yaml run_sft_lora.py \
    --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name trl-lib/Capybara
accelerate launch --config_file qlora.yaml run_sft_lora.py --load_in_4bit \
    --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name trl-lib/Capybara
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
except ModuleNotFoundError as error:
    sys.exit(f"{error}: this recipe needs pip install 'hf-zero[trl,peft]'")

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


def answers() -> list[dict[str, Any]]:
    """Questions about the topics of Python's language reference, and its answers."""
    return [
        {"prompt": f"What is said about {name}?\n", "completion": text[:160]}
        for name, text in paragraphs()[:600]
    ]


def main() -> None:
    parser = TrlParser((ScriptArguments, ModelConfig, SFTConfig))
    parser.set_defaults(
        **DEFAULTS, output_dir="runs/sft-lora", learning_rate=5e-3, max_length=192,
        use_peft=True, lora_target_modules=["all-linear"], dtype=None,  # as the checkpoint has it
    )  # fmt: skip
    data, names, args = parse_arguments(parser)
    splits = (data.dataset_train_split, data.dataset_test_split)
    train, test = load_data(data.dataset_name, data.dataset_config, answers, splits)
    model, tokenizer = load_causal(names.model_name_or_path, **options_of(names, args))
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=get_peft_config(names),
        callbacks=[Measured("sft-lora", {"eval_loss": "held-out loss", "loss": "training loss"})],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # the adapters


if __name__ == "__main__":
    main()
