"""Train sentence embeddings with the trainer of sentence-transformers.

torchrun ... sentences.py MODELS OUT [--deepspeed FILE] [--resume CHECKPOINT]
"""

from __future__ import annotations

import argparse

import datasets
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("models", "out"):
        parser.add_argument(name)
    parser.add_argument("--deepspeed")
    parser.add_argument("--resume")
    options = parser.parse_args()
    args = SentenceTransformerTrainingArguments(
        options.out,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        report_to=[],
    )
    model = SentenceTransformer(f"{options.models}/bert", device="cpu")
    data = f"{options.models}/data/pairs/train.jsonl"
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=datasets.load_dataset("json", data_files=data, split="train"),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.out}/final")


if __name__ == "__main__":
    main()
