"""Train a small GPT-2 with ZeRO on the ranks that srun starts; continue from the newest checkpoint.

On SIGTERM all ranks save one checkpoint after the same step, and exit with code 85, by which the
job script knows that training is to go on.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch

import hf_zero

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import load_text, rows_of, small_gpt2  # noqa: E402

STOPPED = 85
LENGTH = 64  # bytes of a row


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=HERE / "zero3.json")
    parser.add_argument("--num_iterations", type=int, default=120)
    parser.add_argument("--save_every", type=int, default=50, help="iterations between checkpoints")
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between iterations")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/slurm"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def build(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(args.seed)
    return small_gpt2(args, LENGTH)


def batch_of(step: int, count: int, stream: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the batch of ``step`` over all ranks, [count, LENGTH], for any number of ranks."""
    return rows_of(stream, LENGTH, count, torch.Generator().manual_seed(seed + step))


def main() -> int:
    args = parse_args()
    config = json.loads(args.config.read_text())
    engine, *_ = hf_zero.initialize(model=build(args), config=config, resume=args.output_dir)
    engine.stop_on(signal.SIGTERM)
    rank, ranks = engine.global_rank, engine.world_size
    if rank == 0:
        print(f"step {engine.global_steps}, ranks: {ranks}", flush=True)
    stream, _ = load_text(LENGTH)
    for step in range(engine.global_steps, args.num_iterations):
        batch = batch_of(step, config["train_batch_size"], stream, args.seed)
        ids = batch[rank::ranks].to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        time.sleep(args.pause)
        last = step + 1 == args.num_iterations
        if engine.stop_requested or last or (step + 1) % args.save_every == 0:
            engine.save_checkpoint(args.output_dir)
        if engine.stop_requested and not last:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is saved; SLURM may send it twice
    stopped = engine.global_steps < args.num_iterations
    if rank == 0:
        print(f"step {engine.global_steps}, {'stopped' if stopped else 'done'}", flush=True)
    engine.destroy()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return STOPPED if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
