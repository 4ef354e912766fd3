"""Train embeddings of sentences from pairs that belong together, with sentence-transformers.

accelerate launch --config_file cpu.yaml run_sentence_embeddings.py
accelerate launch --config_file 8_gpus.yaml run_sentence_embeddings.py \
    --model_name_or_path BAAI/bge-m3 --dataset_name sentence-transformers/gooaq
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

try:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
except ModuleNotFoundError as error:
    sys.exit(f"{error}: this recipe needs pip install 'sentence-transformers'")
from transformers import BertConfig, BertModel, HfArgumentParser

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


def windows() -> list[dict[str, Any]]:
    """Two overlapping parts of each paragraph of Python's language reference."""
    long = [text for _, text in paragraphs() if len(text) > 100]
    return [{"anchor": text[:80], "positive": text[20:100]} for text in long]


def load_model(name: str | None, args: Any) -> SentenceTransformer:
    if name:
        return SentenceTransformer(name)
    tokenizer = byte_tokenizer(end=True)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    folder = Path(args.output_dir, "start")
    if args.process_index == 0:
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    args.distributed_state.wait_for_everyone()
    words = Transformer(str(folder), max_seq_length=96)
    return SentenceTransformer(modules=[words, Pooling(config.hidden_size)])


def main() -> None:
    parser = HfArgumentParser((Start, SentenceTransformerTrainingArguments))
    parser.set_defaults(
        **DEFAULTS | {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16},
        output_dir="runs/sentence-embeddings", learning_rate=1e-3, dataloader_drop_last=True,
    )  # fmt: skip
    given, args = parse_arguments(parser)
    train, test = load_data(given.dataset_name, given.dataset_config, windows)
    model = load_model(given.model_name_or_path, args)
    curves = {"eval_loss": "held-out loss", "loss": "training loss"}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        loss=MultipleNegativesRankingLoss(model),  # the other positives of a batch are negatives
        callbacks=[Measured("sentence-embeddings", curves)],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
