"""Train sentence embeddings with the trainer of sentence-transformers.

torchrun ... sentences.py MODELS OUT [--loss NAME] [--deepspeed FILE] [--resume CHECKPOINT]
"""

from __future__ import annotations

import argparse

import datasets
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import set_seed

ROWS = {"SoftmaxLoss": "classes"}


def make_loss(name: str, model: SentenceTransformer, models: str) -> torch.nn.Module:
    """Return the loss ``name`` of ``model``; a guide is another model of ``models``."""
    if name == "SoftmaxLoss":
        return losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)
    if name == "GISTEmbedLoss":
        return losses.GISTEmbedLoss(model, SentenceTransformer(f"{models}/guide", device="cpu"))
    return losses.MultipleNegativesRankingLoss(model)


def outside(loss: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of ``loss`` that its model does not have, by name."""
    named = loss.named_parameters()
    return {name: value for name, value in named if not name.startswith("model.")}


def average(gradient: torch.Tensor) -> torch.Tensor:
    """Return the average of ``gradient`` over the ranks."""
    whole = gradient.clone()
    torch.distributed.all_reduce(whole)
    return whole / torch.distributed.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("models", "out"):
        parser.add_argument(name)
    parser.add_argument("--loss", default="MultipleNegativesRankingLoss")
    parser.add_argument("--deepspeed")
    parser.add_argument("--resume")
    options = parser.parse_args()
    set_seed(0)
    args = SentenceTransformerTrainingArguments(
        options.out,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        # without an engine the Trainer clips the gradients of the model alone
        max_grad_norm=1e6 if options.loss == "SoftmaxLoss" else 1.0,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        report_to=[],
    )
    model = SentenceTransformer(f"{options.models}/bert", device="cpu")
    loss = make_loss(options.loss, model, options.models)
    if not options.deepspeed:  # the trainer wraps the model in DDP, and the loss not
        for parameter in outside(loss).values():
            parameter.register_hook(average)
    data = f"{options.models}/data/{ROWS.get(options.loss, 'pairs')}/train.jsonl"
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=datasets.load_dataset("json", data_files=data, split="train"),
        loss=loss,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.out}/final")
    if trainer.is_world_process_zero() and (weights := outside(loss)):
        torch.save(weights, f"{options.out}/final/outside.pt")


if __name__ == "__main__":
    main()
