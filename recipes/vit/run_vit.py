"""Fine-tune a vision transformer to tell pictures apart, with the Trainer.

accelerate launch --config_file cpu.yaml run_vit.py
accelerate launch --config_file 8_gpus.yaml run_vit.py \
    --model_name_or_path google/vit-large-patch16-224-in21k --dataset_name ethz/food101
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import DEFAULTS, Measured, Start, load_data, parse_arguments

KINDS, SIDE = 10, 32
Rows = list[dict[str, Any]]


@dataclass
class Pictures(Start):
    image_column: str = "image"
    label_column: str = "label"


def drawn() -> datasets.Dataset:
    """Squares of ten hues [2000, 3, 32, 32], from -1 to 1, anywhere on a ground of noise."""
    random, count = torch.Generator().manual_seed(0), 2000
    kinds = torch.randint(KINDS, (count,), generator=random)
    hues = kinds[:, None] * (6.2832 / KINDS) + torch.tensor([0.0, 2.0944, 4.1888])
    left, top = torch.randint(SIDE - 12, (2, count, 1, 1, 1), generator=random)
    y, x = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    inside = (x >= left) & (x < left + 12) & (y >= top) & (y < top + 12)
    noise = 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=random)
    images = (noise + inside * 0.7 * hues.cos()[:, :, None, None]).clamp(-1, 1)
    return datasets.Dataset.from_dict({"image": images.numpy(), "label": kinds.numpy()})


def load_model(name: str | None, labels: list[str]) -> torch.nn.Module:
    if name:
        return AutoModelForImageClassification.from_pretrained(
            name,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
            ignore_mismatched_sizes=True,  # its head is for other labels
        )
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIDE, patch_size=4, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, num_labels=len(labels), id2label=dict(enumerate(labels)),
    )  # fmt: skip
    return ViTForImageClassification(config)


def main() -> None:
    parser = HfArgumentParser((Pictures, TrainingArguments))
    parser.set_defaults(
        **DEFAULTS | {"per_device_train_batch_size": 32, "max_steps": 100},
        output_dir="runs/vit", learning_rate=2e-3, remove_unused_columns=False,
    )  # fmt: skip
    given, args = parse_arguments(parser)
    train, test = load_data(given.dataset_name, given.dataset_config, drawn, ("train", "test"))
    kinds = train.features[given.label_column]
    model = load_model(given.model_name_or_path, getattr(kinds, "names", [*map(str, range(KINDS))]))
    processor: Any = None
    if given.model_name_or_path:
        processor = AutoImageProcessor.from_pretrained(given.model_name_or_path)

    def collate(rows: Rows) -> dict[str, torch.Tensor]:
        images = [row[given.image_column] for row in rows]
        if processor is None:
            pixels = torch.tensor(images)
        else:
            found = processor([image.convert("RGB") for image in images], return_tensors="pt")
            pixels = found["pixel_values"]
        return {
            "pixel_values": pixels,
            "labels": torch.tensor([row[given.label_column] for row in rows]),
        }

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    curves = {"eval_loss": "held-out loss", "loss": "training loss"}
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=[Measured("vit", curves)],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    right = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        if processor is not None:
            processor.save_pretrained(args.output_dir)
        print(f"{right:.1%} of the held-out pictures are classified correctly")


if __name__ == "__main__":
    main()
