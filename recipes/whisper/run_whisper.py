"""Fine-tune Whisper to write down speech, with the Seq2SeqTrainer.

accelerate launch --config_file cpu.yaml run_whisper.py
accelerate launch --config_file 8_gpus.yaml run_whisper.py \
    --model_name_or_path openai/whisper-large-v3 --dataset_name google/fleurs \
    --dataset_config de_de --text_column transcription
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import DEFAULTS, Measured, Start, byte_tokenizer, load_data, parse_arguments

RATE = 16_000  # samples a second
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz, of a telephone's keys
KEYS = {key: (LOW[at // 3], HIGH[at % 3]) for at, key in enumerate("123456789*0#")}


@dataclass
class Speech(Start):
    audio_column: str = "audio"
    text_column: str = "text"


def dialled() -> datasets.Dataset:
    """Four keys of a telephone each [600 x 16,000 samples, one second], and which they are."""
    random = torch.Generator().manual_seed(0)
    chosen = torch.randint(10, (600, 4), generator=random)
    texts = ["".join("1234567890"[key] for key in row) for row in chosen.tolist()]
    time = torch.arange(RATE // 4) * (6.2832 / RATE)
    tones = {key: sum((hertz * time).sin() for hertz in pair) for key, pair in KEYS.items()}
    sounds = torch.stack([torch.cat([tones[key] for key in text]) for text in texts])
    sounds = sounds / 4 + 0.02 * torch.randn(sounds.shape, generator=random)
    return datasets.Dataset.from_dict({"audio": sounds.numpy(), "text": texts})


def load_model(name: str | None) -> tuple[Any, Any, Any]:
    """A model, its feature extractor and its tokenizer."""
    if name:
        processor = AutoProcessor.from_pretrained(name)
        model = AutoModelForSpeechSeq2Seq.from_pretrained(name)
        return model, processor.feature_extractor, processor.tokenizer
    tokenizer = byte_tokenizer(end=True)
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(tokenizer), d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_source_positions=50, max_target_positions=32,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return (
        WhisperForConditionalGeneration(config),
        WhisperFeatureExtractor(chunk_length=1),
        tokenizer,
    )


def main() -> None:
    parser = HfArgumentParser((Speech, Seq2SeqTrainingArguments))
    parser.set_defaults(
        **DEFAULTS | {"max_steps": 300, "eval_steps": 50, "logging_steps": 10},
        output_dir="runs/whisper", learning_rate=3e-3, remove_unused_columns=False,
        label_names=["labels"],
        # the model's loss is a mean over its own rank's tokens, which the Trainer would multiply
        average_tokens_across_devices=False,
    )  # fmt: skip
    given, args = parse_arguments(parser)
    data = load_data(given.dataset_name, given.dataset_config, dialled)
    if given.dataset_name:  # else the samples are RATE a second as they are
        audio = datasets.Audio(sampling_rate=RATE)
        train, test = (part.cast_column(given.audio_column, audio) for part in data)
    else:
        train, test = data
    model, extractor, tokenizer = load_model(given.model_name_or_path)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sounds = [row[given.audio_column] for row in rows]
        samples = [sound["array"] if given.dataset_name else sound for sound in sounds]
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt")
        texts = tokenizer([row[given.text_column] for row in rows], padding=True)
        found = zip(texts["input_ids"], texts["attention_mask"])
        labels = torch.tensor([[id if kept else -100 for id, kept in zip(*each)] for each in found])
        if (labels[:, 0] == model.config.decoder_start_token_id).all():
            labels = labels[:, 1:]  # the model puts it there itself
        return {"input_features": features["input_features"], "labels": labels}

    curves = {"eval_loss": "held-out loss", "loss": "training loss"}
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        data_collator=collate,
        callbacks=[Measured("whisper", curves)],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        extractor.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
