"""A loop of hf_zero.initialize at stage 3, and the same in one process by the reference engine.

``--until-lost SECONDS`` steps on until a peer is gone, which has to be an error, with that time as
the limit of a silent wait.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

GLOBAL_BATCH = 8
STEPS = 4
WIDTH = 16


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(7)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def alone():
    from hf_zero.config import ZeroConfig
    from hf_zero.parity.reference import Reference

    model, optimizer = build()
    losses = train(Reference(model, optimizer, ZeroConfig(stage=0).resolve(1)))
    return {"losses": losses, "weights": weights(model)}


def train(engine):
    losses = []
    for step in range(STEPS):
        x, y = share(step, engine.global_rank, engine.world_size)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}


def share(step, rank, world):
    part = GLOBAL_BATCH // world
    x, y = batch(step)
    return x[rank * part : (rank + 1) * part], y[rank * part : (rank + 1) * part]


def trained():
    import hf_zero

    model, optimizer = build()
    config = hf_zero.ZeroConfig(stage=3, train_micro_batch_size_per_gpu=4, timeout=60.0)
    engine, _, _, _ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    losses = train(engine)
    with hf_zero.GatheredParameters(list(model.parameters())):
        final = weights(model)
    engine.destroy()
    return {"losses": losses, "weights": final}


def until_lost(out, limit):
    import hf_zero

    model, optimizer = build()
    config = hf_zero.ZeroConfig(stage=3, train_micro_batch_size_per_gpu=1, timeout=limit)
    # ranks may come late; the limit is for those that have been there
    hf_zero.init_distributed(timeout=120.0)
    engine, _, _, _ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(100_000):
        x, y = share(step % 100, engine.global_rank, engine.world_size)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        if step == 5:
            (out / f"stepping-{engine.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.01)


def place():
    """Return this rank's address, those of all ranks, arguments and launcher variables."""
    from hf_zero.distributed.rank_hosts import own_address
    from hf_zero.distributed.world_group import get_world_group

    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    named = (*of_ranks, "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "MARK")
    address = own_address(os.environ["MASTER_ADDR"])
    return {
        "address": address,
        "addresses": get_world_group().all_gather_object(address),
        "argv": sys.argv[1:],
        **{name: os.environ.get(name) for name in named},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until-lost", type=float)
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    if given.until_lost:
        until_lost(given.out, given.until_lost)
        return
    report = {**trained(), "place": place()}
    print(f"rank {os.environ['RANK']} is done")
    (given.out / f"report-{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
