"""Train a small T5 to translate, from scratch, with the Seq2SeqTrainer. The file given as
--deepspeed decides what is sharded.

    torchrun --nproc_per_node 2 run_translation.py --deepspeed zero3.json
    torchrun --nproc_per_node 2 run_translation.py --deepspeed zero3.json \\
        --resume_from_checkpoint latest
    torchrun --nproc_per_node 2 run_translation.py --deepspeed zero3.json \\
        --catalog /usr/share/locale/de/LC_MESSAGES/git.mo
    torchrun --nproc_per_node 2 run_translation.py --deepspeed zero3.json \\
        --dataset_name Helsinki-NLP/opus_books --dataset_config_name de-en
"""

from __future__ import annotations

import shutil
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy
import torch
from phrases import phrases
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import parse_arguments

CARD = Path(__file__).with_name("README.md")
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass
class Data:
    dataset_name: str | None = field(
        default=None, metadata={"help": "a data set on the hub with a `translation` column"}
    )
    dataset_config_name: str | None = None
    catalog: Path | None = field(
        default=None,
        metadata={
            "help": "a gettext file NAME.mo, such as programs carry: English and its translation"
        },
    )
    source_lang: str = "en"
    target_lang: str = "de"
    phrases: int = field(
        default=20_000, metadata={"help": "without either, how many phrases to make"}
    )
    eval_pairs: int = 400
    max_length: int = 48


@dataclass
class Model:
    vocab_size: int = 512
    d_model: int = 128
    num_layers: int = 2
    num_heads: int = 4


def read_catalog(path: Path) -> list[tuple[str, str]]:
    """The messages of a gettext catalog and their translations; those of many lines or with
    plural forms are left out.
    """
    content = path.read_bytes()
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    count, sources, targets = struct.unpack_from(f"{order}3I", content, 8)

    def text(table: int, number: int) -> str:
        length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
        return content[start : start + length].decode()

    pairs = ((text(sources, number), text(targets, number)) for number in range(count))
    return [
        (source.strip(), target.strip())
        for source, target in pairs
        if source and target and not {"\n", "\0"} & {*source.strip(), *target}
    ]


def load_pairs(data: Data, seed: int) -> tuple[list[tuple[str, str]], str]:
    """Sentences and their translations, shuffled, and where they come from."""
    if data.catalog:
        pairs, name = read_catalog(data.catalog), data.catalog.name
    elif data.dataset_name:
        try:
            split = datasets.load_dataset(
                data.dataset_name, data.dataset_config_name, split="train"
            )
            pairs = [
                (pair[data.source_lang], pair[data.target_lang]) for pair in split["translation"]
            ]
            name = data.dataset_name
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            remedy = "correct the name, or leave --dataset_name out to train on generated phrases"
            raise SystemExit(f"{data.dataset_name} cannot be loaded ({error}); {remedy}") from None
    else:
        pairs, name = phrases(data.phrases, seed), "phrases"
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    return [pairs[place] for place in order], name


def train_tokenizer(
    pairs: list[tuple[str, str]], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """One byte-level BPE for both languages. Every rank trains the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL.values()],
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=6,
    )
    tokenizer.train_from_iterator((side for pair in pairs for side in pair), trainer)
    end = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=end)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, **SPECIAL
    )


def encoded(pairs: list[tuple[str, str]], tokenizer: Any) -> datasets.Dataset:
    """Token ids of both sides; what is longer than the tokenizer's length is cut."""
    sources, targets = (
        tokenizer([pair[side] for pair in pairs], truncation=True)["input_ids"] for side in (0, 1)
    )
    return datasets.Dataset.from_dict({"input_ids": sources, "labels": targets})


class CardBesideCheckpoints(TrainerCallback):
    """The model card goes where a converted model will look for it."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            shutil.copy(CARD, Path(args.output_dir) / f"checkpoint-{state.global_step}" / CARD.name)


def main() -> None:
    parser = HfArgumentParser((Data, Model, Seq2SeqTrainingArguments))
    parser.set_defaults(
        output_dir="runs/translation", max_steps=800, per_device_train_batch_size=32,
        per_device_eval_batch_size=50, learning_rate=1e-3, adam_beta2=0.98,
        lr_scheduler_type="cosine", warmup_steps=50, logging_steps=50, save_strategy="steps",
        save_steps=200, predict_with_generate=True,
        generation_max_length=48, label_names=["labels"], report_to="none",
        use_cpu=not torch.accelerator.is_available(), disable_tqdm=True, seed=42,
        # the model's loss is a mean over its own rank's tokens, which the Trainer would multiply
        average_tokens_across_devices=False,
    )  # fmt: skip
    data, shape, args = parse_arguments(parser)
    args.eval_on_start = args.resume_from_checkpoint is None
    set_seed(args.seed)
    pairs, source = load_pairs(data, args.seed)
    tokenizer = train_tokenizer(pairs, shape.vocab_size, data.max_length)
    held_out, train = (
        encoded(pairs[: data.eval_pairs], tokenizer),
        encoded(pairs[data.eval_pairs :], tokenizer),
    )
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=shape.d_model,
            d_kv=shape.d_model // shape.num_heads,
            d_ff=2 * shape.d_model,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )

    def exact(prediction: Any) -> dict[str, float]:
        """The part of the translations that is right to the letter."""
        told, wanted = (
            tokenizer.batch_decode(
                numpy.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True
            )
            for ids in (prediction.predictions, prediction.label_ids)
        )
        return {"exact_match": sum(map(str.__eq__, told, wanted)) / len(wanted)}

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        compute_metrics=exact,
        callbacks=[CardBesideCheckpoints()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    figures = trainer.evaluate()
    if trainer.is_world_process_zero():
        trainer.save_state()
        print(
            f"{source}: evaluation loss {figures['eval_loss']:.4f}, right to the letter "
            f"{figures['eval_exact_match']:.3f}",
            flush=True,
        )
    asked = (
        [("at half past six", "um halb sieben")]
        if source == "phrases"
        else pairs[: data.eval_pairs][:1]
    )
    told = trainer.predict(encoded(asked * args.world_size, tokenizer)).predictions[0]
    if trainer.is_world_process_zero():
        translation = tokenizer.decode(
            numpy.where(told < 0, tokenizer.pad_token_id, told), skip_special_tokens=True
        )
        print(f"{asked[0][0]!r} -> {translation.strip()!r}", flush=True)


if __name__ == "__main__":
    main()
