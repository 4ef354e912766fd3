"""A training that goes on elsewhere, on the device.

``python -m tests.late.elastic MODE FOLDER LEG``. A leg of a way is two steps with one stage and
place of states on some ranks, from the checkpoint of the leg before. A step has :data:`PARTS`
micro-batches whatever the ranks are. One line of JSON a way, and one of a plain loop.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from tests.late import device, training

import torch  # isort: skip
import hf_zero  # isort: skip

PARTS, STEPS = 4, 2  # micro-batches of a step over all ranks, steps of a leg
RANKS = (2, 1, 2)  # of each leg
WAYS = {
    "whole to host to shards": ("stage 1", "stage 3, all on the host", "stage 3"),
    "host to shards to host": (
        "stage 2, optimizer on the host",
        "stage 3",
        "stage 3, all on the host",
    ),
    "shards to host to host": (
        "stage 3",
        "stage 2, optimizer on the host",
        "stage 2, optimizer on the host, small pieces",
    ),
}


def parts(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(PARTS, training.ROWS, training.WIDTH, generator=generator)


def plain() -> list[list[float]]:
    """The losses of every part of every step, in a plain loop on the CPU."""
    model, chosen = training.tower(), training.config("stage 1")
    optimizer = torch.optim.AdamW(model.parameters(), **chosen["optimizer"]["params"])
    found = []
    for step in range(len(RANKS) * STEPS):
        losses = torch.stack([model(part) for part in parts(step)])
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses.tolist())
    return found


def train(way: str, leg: int, rank: int, folder: Path) -> list[list[float]]:
    """The losses of this rank's parts: those of every ``RANKS[leg]``-th, from ``rank`` on."""
    chosen = training.config(WAYS[way][leg]) | {
        "gradient_accumulation_steps": PARTS // RANKS[leg],
        "gradient_clipping": training.config("stage 1")["gradient_clipping"],
    }
    engine, *_ = hf_zero.initialize(model=training.tower(), config=chosen)
    if leg:
        engine.load_checkpoint(str(folder), tag=str(leg - 1))
    kept = []
    for step in range(leg * STEPS, (leg + 1) * STEPS):
        for part in parts(step)[rank :: RANKS[leg]]:
            loss = engine(part.pin_memory().to(engine.device, non_blocking=True))
            engine.backward(loss)
            engine.step()
            kept.append(loss.detach())
    engine.save_checkpoint(str(folder), tag=str(leg))
    each = PARTS // RANKS[leg]
    losses = [loss.item() for loss in kept]
    engine.destroy()
    return [losses[at * each : (at + 1) * each] for at in range(STEPS)]


def main() -> None:
    mode, _, seed = sys.argv[1].partition(":")
    folder, leg, rank = Path(sys.argv[2]), int(sys.argv[3]), int(os.environ["RANK"])
    device.configure(mode, seed=int(seed or 0) + rank, max_us=300, nap=0.2)
    if leg == rank == 0:
        print(json.dumps({"way": "plain", "losses": plain()}), flush=True)
    for way in WAYS:
        device.forget()
        losses = train(way, leg, rank, folder / way.replace(" ", "_"))
        gc.collect()
        device.synchronize_all()
        found = {"way": way, "rank": rank, "losses": losses, "reports": device.reports()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
