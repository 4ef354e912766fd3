"""Train the same small GPT-2 on the same number of samples once for each DeepSpeed configuration:
in small batches with AdamW, and in large ones with AdamW and with LAMB. Plot their held-out losses
over the samples.

    torchrun --nproc_per_node 2 run_lamb_large_batch.py
    torchrun --nproc_per_node 2 run_lamb_large_batch.py --deepspeed_config large_batch_lamb.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import evaluate, finish, load_text, parser_of, small_gpt2  # noqa: E402

CONFIGS = ("small_batch_adamw.json", "large_batch_adamw.json", "large_batch_lamb.json")


def parse_args() -> argparse.Namespace:
    configs = [HERE / name for name in CONFIGS]
    parser = parser_of(str(__doc__), configs, samples=16384)
    parser.add_argument("--seq_length", type=int, default=32, help="bytes of a row")
    parser.add_argument("--warmup", type=float, default=0.1, help="the share of all iterations")
    return parser.parse_args()


def build(file: Path, args: argparse.Namespace) -> Any:
    """An engine around a new model; whatever the file, the model begins with the same weights."""
    torch.manual_seed(args.seed)
    net = small_gpt2(args, args.seq_length)
    config = json.loads(file.read_text())
    iterations = args.samples // config["train_batch_size"]

    def share(step: int) -> float:
        """Of the full learning rate, as DeepSpeed trains BERT with LAMB: up with the square of the
        iteration, then down by a tenth in each thirtieth of all.
        """
        done = (step + 1) / iterations
        if done < args.warmup:
            return (done / args.warmup) ** 2
        return 0.9 ** (30 * (done - args.warmup))

    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share),
    )
    return engine


def train(file: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run with one configuration: a row for each evaluation, on every rank."""
    engine, name = build(file, args), file.stem
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    stream, rows_held_out = load_text(args.seq_length)
    held_out = {"input_ids": rows_held_out, "labels": rows_held_out}
    batch, parts = engine.train_batch_size(), engine.gradient_accumulation_steps()
    micro = engine.train_micro_batch_size_per_gpu()
    iterations = args.samples // batch
    interval = max(1, iterations // args.evaluations)
    began = time.perf_counter()

    def row(step: int) -> dict[str, Any]:
        return {
            "config": name,
            "step": step,
            "samples": step * batch,
            "tokens": step * batch * args.seq_length,
            "loss": evaluate(engine, held_out),
            "seconds": time.perf_counter() - began,
        }

    rows = [row(0)]
    bar = tqdm(total=iterations, disable=None if rank == 0 else True, desc=name)
    for step in range(1, iterations + 1):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - args.seq_length, (batch,), generator=random)
        for part in range(parts):
            first = (part * ranks + rank) * micro
            places = starts[first : first + micro, None] + torch.arange(args.seq_length)
            tokens = stream[places].to(engine.device)  # [micro, seq_length]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        bar.update()
        if step % interval == 0 or step == iterations:
            rows.append(row(step))
            bar.set_postfix(loss=f"{rows[-1]['loss']:.3f}", refresh=False)
    bar.close()
    deepspeed.log_dist(
        f"{name}: {iterations} iterations of {batch} samples, held-out loss {rows[-1]['loss']:.3f}",
        ranks=[0],
    )
    return rows


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    rows = [row for file in args.deepspeed_config for row in train(file, args)]
    finish(rows, args, "A small GPT-2, in small and in large batches", ("samples",))


if __name__ == "__main__":
    main()
