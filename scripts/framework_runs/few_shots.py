"""Train a classifier on few rows with SetFit: its body by pairs of sentences, then its head.

accelerate launch ... few_shots.py MODELS OUT
"""

from __future__ import annotations

import sys

import datasets
from setfit import SetFitModel, Trainer, TrainingArguments


def main() -> None:
    models, out = sys.argv[1:]
    args = TrainingArguments(
        out,
        batch_size=4,
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        logging_first_step=True,
        body_learning_rate=1e-3,
        warmup_proportion=0.0,
        report_to="none",
    )
    data = datasets.load_dataset(
        "json", data_files=f"{models}/data/classes/train.jsonl", split="train"
    )
    model = SetFitModel.from_pretrained(f"{models}/bert")
    columns = {"premise": "text", "label": "label"}
    trainer = Trainer(model=model, args=args, train_dataset=data, column_mapping=columns)
    trainer.train()
    model.save_pretrained(f"{out}/final")


if __name__ == "__main__":
    main()
