"""Fine-tune an encoder-decoder to summarize, with the Seq2SeqTrainer.

accelerate launch --config_file cpu.yaml run_t5_summarization.py
accelerate launch --config_file 8_gpus.yaml run_t5_summarization.py \
    --model_name_or_path google/flan-t5-large --dataset_name EdinburghNLP/xsum
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import (
    DEFAULTS,
    Measured,
    Start,
    byte_tokenizer,
    load_data,
    paragraphs,
    parse_arguments,
)


@dataclass
class Summaries(Start):
    document_column: str = "document"
    summary_column: str = "summary"
    prefix: str = "summarize: "
    max_source_length: int = 96
    max_target_length: int = 32


def titles() -> list[dict[str, Any]]:
    """Paragraphs of Python's language reference, and the topic of each."""
    return [{"document": text, "summary": name} for name, text in paragraphs()]


def load_model(name: str | None) -> tuple[Any, Any]:
    if name:
        return AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer = byte_tokenizer(end=True)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokenizer


def main() -> None:
    parser = HfArgumentParser((Summaries, Seq2SeqTrainingArguments))
    parser.set_defaults(
        **DEFAULTS, output_dir="runs/t5-summarization", learning_rate=3e-3,
        # the model's loss is a mean over its own rank's tokens, which the Trainer would multiply
        average_tokens_across_devices=False,
    )  # fmt: skip
    given, args = parse_arguments(parser)
    data = load_data(given.dataset_name, given.dataset_config, titles)
    model, tokenizer = load_model(given.model_name_or_path)

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        documents = [given.prefix + text for text in rows[given.document_column]]
        found = tokenizer(documents, truncation=True, max_length=given.max_source_length)
        summaries = rows[given.summary_column]
        ids = tokenizer(summaries, truncation=True, max_length=given.max_target_length)
        return {**found, "labels": ids["input_ids"]}

    train, test = (
        part.map(encode, batched=True, remove_columns=part.column_names) for part in data
    )
    curves = {"eval_loss": "held-out loss", "loss": "training loss"}
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[Measured("t5-summarization", curves)],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
