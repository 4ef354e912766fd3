"""Train all parameters of a causal language model of 8B on one GPU, in a plain loop of Accelerate:
the file given to ``accelerate launch`` keeps the optimizer, and the parameters, in host memory.

    accelerate launch --config_file cpu.yaml run_8b.py
    accelerate launch --config_file 80gb_gpu.yaml run_8b.py \\
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name wikimedia/wikipedia \\
        --dataset_config 20231101.simple --max_length 2048
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import load_causal, load_data, paragraphs, report, tensor_bytes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path", help="default: a small Llama from scratch")
    parser.add_argument(
        "--dataset_name", help="with a column `text`; default: Python's language reference"
    )
    parser.add_argument("--dataset_config")
    parser.add_argument("--max_length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--eval_steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--output_dir", default="runs/8b-one-gpu-offload")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def texts() -> list[dict[str, Any]]:
    return [{"text": text} for _, text in paragraphs()[:600]]


def cut(data: datasets.Dataset, tokenizer: Any, length: int) -> datasets.Dataset:
    """All texts as streams of tokens, cut into rows [length]."""

    def rows_of(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"])["input_ids"]
        stream = [*chain.from_iterable([*each, tokenizer.eos_token_id] for each in ids)]
        starts = range(0, len(stream) - length + 1, length)
        return {"input_ids": [stream[start : start + length] for start in starts]}

    return data.map(rows_of, batched=True, remove_columns=data.column_names).with_format("torch")


def epochs(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of one epoch after another; itertools.cycle would keep all of them in memory."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
    """Mean loss over at most 20 held-out batches."""
    model.eval()
    losses = [model(**batch, labels=batch["input_ids"]).loss for batch in islice(loader, 20)]
    model.train()
    return torch.stack(losses).mean().item()


def main() -> None:
    args = parse()
    accelerator = Accelerator()
    set_seed(args.seed)
    parts = load_data(args.dataset_name, args.dataset_config, texts)
    model, tokenizer = load_causal(args.model_name_or_path)
    model.config.use_cache = False
    loaders = [
        DataLoader(cut(part, tokenizer, args.max_length), args.per_device_train_batch_size)
        for part in parts
    ]
    if not all(map(len, loaders)):
        raise SystemExit(f"a part of the text has no row of {args.max_length} tokens; use fewer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, train, test = accelerator.prepare(model, optimizer, *loaders)
    held_out, training = [(0, evaluate(model, test))], []
    began = time.perf_counter()
    for step, batch in enumerate(islice(epochs(train), args.max_steps), 1):
        loss = model(**batch, labels=batch["input_ids"]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.max_steps:
            training.append((step, loss.item()))
            accelerator.print(f"step {step}: loss {training[-1][1]:.3f}")
        if step % args.eval_steps == 0 or step == args.max_steps:
            held_out.append((step, evaluate(model, test)))
    seconds = time.perf_counter() - began
    state = tensor_bytes()
    if accelerator.is_main_process:
        samples = args.max_steps * args.per_device_train_batch_size * accelerator.num_processes
        row = {
            "recipe": "8b-one-gpu-offload",
            "ranks": accelerator.num_processes,
            "parameters": parameters,
            "trained": parameters,
            "steps": args.max_steps,
            "result": ["held-out loss", held_out[0][1], held_out[-1][1]],
            "samples_per_second": samples / seconds,
            "seconds": seconds,
            "state_bytes": state,
        }
        curves = {"held-out loss": held_out, "training loss": training}
        report(Path(args.output_dir), row, curves, "loss")
    accelerator.save_state(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
