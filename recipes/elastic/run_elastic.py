"""Train a small GPT-2 on any number of hosts, and resume after a restart from the newest state in
the memory of the hosts or on disk.

    python hosts.py
    torchrun --nnodes 1:4 --nproc_per_node 1 --max_restarts 100 --rdzv_backend c10d \\
        --rdzv_endpoint STORE:29400 --rdzv_id a-name --rdzv_conf is_host=0 run_elastic.py

`hosts.py` starts this script on hosts that it creates and kills.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import load_text, rows_of, small_gpt2  # noqa: E402

LENGTH = 64  # bytes of a row


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed_config", type=Path, default=HERE / "memory.json")
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument("--num_iterations", type=int, default=240)
    parser.add_argument(
        "--save_every", type=int, default=50, help="iterations between saves on disk; 0: none"
    )
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/elastic/one"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def log(args: argparse.Namespace, **row: Any) -> None:
    """Append a row, with the time, to the file of all attempts."""
    with (args.output_dir / "rows.jsonl").open("a") as file:
        print(json.dumps({"time": time.time(), **row}), file=file, flush=True)


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    net = small_gpt2(args, LENGTH)
    config = json.loads(args.deepspeed_config.read_text())
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config
    )
    folder, _ = engine.load_checkpoint(str(args.output_dir / "checkpoints"))
    begun = engine.global_steps
    if rank == 0:
        log(args, event="begun", step=begun, ranks=ranks, folder=folder)
    stream, _ = load_text(LENGTH)
    micro, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for step in range(begun, args.num_iterations):
        # the rows of a step do not depend on the ranks, each of which takes its part of them
        random = torch.Generator().manual_seed(args.seed + step)
        rows = rows_of(stream, LENGTH, micro * parts * ranks, random).chunk(parts * ranks)
        total = torch.zeros(())
        for part in range(parts):
            ids = rows[part * ranks + rank].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu() / (parts * ranks)
        deepspeed.comm.all_reduce(total)
        if rank == 0:
            log(args, event="step", step=step + 1, ranks=ranks, loss=total.item())
        if args.save_every and (step + 1) % args.save_every == 0:
            engine.save_checkpoint(str(args.output_dir / "checkpoints"))
    engine.destroy()
    if rank == 0:
        log(args, event="ended", step=args.num_iterations, ranks=ranks)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
