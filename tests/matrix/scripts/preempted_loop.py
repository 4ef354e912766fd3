"""A loop of plain PyTorch with hf-zero's engine that may be told to end at any time; ``--plain`` is
the same without an engine.

Every step is noted when it begins, in ``OUT/begun-RANK``; the losses of all ranks are in the
reports.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEPS, ROWS, RANKS = 12, 3, 2


def model():
    torch.manual_seed(5)
    return nn.Sequential(
        *(module for _ in range(3) for module in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 3)
    )


def batch(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(ROWS, 24), torch.randint(3, (ROWS,))


def loss_of(net, step, rank):
    rows, labels = batch(step, rank)
    return nn.functional.cross_entropy(net(rows), labels)


def alone():
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-6)
    for step in range(STEPS):
        each = [loss_of(net, step, rank) for rank in range(RANKS)]
        sum(each).div(RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return {"losses": losses}


def trained(out, stage):
    import hf_zero

    net = model()
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": ROWS}
    engine, *_ = hf_zero.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-6), config=config
    )
    engine.stop_on(signal.SIGTERM)
    if (out / "run").exists():
        engine.load_checkpoint(out / "run")
    rank, first, losses = engine.global_rank, engine.global_steps, []
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    for step in range(first, STEPS):
        with open(out / f"begun-{rank}", "a") as file:
            file.write(f"{step}\n")
        time.sleep(0.2)
        loss = loss_of(engine, step, rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.stop_requested:
            engine.save_checkpoint(out / "run")
            break
    return {"rank": rank, "first": first, "losses": losses, "stopped": engine.stop_requested}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = alone() if args.plain else trained(args.out, args.stage)
    (args.out / f"report-{report.get('rank', 0)}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(0)
