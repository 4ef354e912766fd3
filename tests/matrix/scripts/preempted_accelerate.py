"""A loop for Accelerate that may be told to end at any time.

Under ZeRO the prepared model listens; plain, nobody does.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

STEPS, ROWS = 12, 4  # ROWS of all ranks together


def model():
    torch.manual_seed(5)
    return nn.Sequential(
        *(module for _ in range(3) for module in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 3)
    )


def rows():
    torch.manual_seed(23)
    return [(torch.randn(24), torch.randint(3, ())) for _ in range(2 * ROWS * STEPS)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    rank, net = accelerator.process_index, model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-6)
    loader = DataLoader(rows(), batch_size=ROWS // accelerator.num_processes)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    listens = hasattr(net, "stop_on")
    if listens:
        net.stop_on(signal.SIGTERM)
    first = 0
    if (args.out / "state").exists():
        accelerator.load_state(str(args.out / "state"))
        first = net.global_steps
        loader = accelerator.skip_first_batches(loader, 2 * first)
    (args.out / f"pid-{rank}").write_text(str(os.getpid()))
    losses, total = [], 0.0
    for features, labels in loader:
        with open(args.out / f"begun-{rank}", "a") as file:
            file.write(f"{len(losses)}\n")
        time.sleep(0.1)
        with accelerator.accumulate(net):
            loss = nn.functional.cross_entropy(net(features), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += accelerator.gather(loss.detach()).mean().item() / 2
        if accelerator.sync_gradients:
            losses.append(total)
            total = 0.0
        if listens and net.stop_requested:
            accelerator.save_state(str(args.out / "state"))
            break
    report = {"first": first, "losses": losses, "stopped": listens and net.stop_requested}
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))
    accelerator.end_training()
