"""Train with one of TRL's experimental trainers for preferences, which have no command.

accelerate launch ... preferences.py orpo|cpo MODELS OUT [--resume CHECKPOINT]
"""

from __future__ import annotations

import argparse

import datasets
import transformers
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

KINDS = {"orpo": (ORPOConfig, ORPOTrainer), "cpo": (CPOConfig, CPOTrainer)}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kind", "models", "out"):
        parser.add_argument(name)
    parser.add_argument("--resume")
    options = parser.parse_args()
    arguments, trainer = KINDS[options.kind]
    folder = f"{options.models}/llama"
    args = arguments(
        options.out,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        bf16=False,
        report_to=[],
    )
    data = f"{options.models}/data/preferences/train.jsonl"
    training = trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        args=args,
        train_dataset=datasets.load_dataset("json", data_files=data, split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    training.train(resume_from_checkpoint=options.resume)
    training.save_model(options.out)


if __name__ == "__main__":
    main()
