"""A run of the Trainer: accumulation, clipping, warmup, evaluation and saves of a tiny Llama."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import hf_zero

STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]


def main() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    arguments = hf_zero.TrainingArguments(
        output_dir=FOLDER,
        zero_config={"stage": STAGE},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        label_smoothing_factor=0.1,
        max_steps=8,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        bf16="bf16" in sys.argv,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (64, 12), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=data, eval_dataset=data[:8]
    )
    trainer.train()
    trainer.save_model(f"{FOLDER}/model")


main()
