"""Train a language model in a loop of Lightning's Fabric.

fabric run --strategy zero_stage_3 ... fabric.py MODELS OUT [--resume CHECKPOINT]
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

import hf_zero

STEPS, SAVE, BATCH = 6, 3, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models")
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    fabric = Fabric()
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{options.models}/llama")
    model.train()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(7, 40, (STEPS, fabric.world_size, BATCH, 12), generator=draw)
    losses: dict[str, float] = {}
    state = {"model": model, "optimizer": optimizer, "losses": losses}
    if options.resume:
        fabric.load(options.resume, state)
        losses = state["losses"]
    for step in range(len(losses), STEPS):
        batch = rows[step, fabric.global_rank]
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[str(step + 1)] = float(fabric.all_reduce(loss.detach(), reduce_op="mean"))
        if step + 1 == SAVE and not options.resume:
            fabric.save(options.out / f"checkpoint-{SAVE}", state)
    whole = isinstance(fabric.strategy, DDPStrategy)
    with nullcontext() if whole else hf_zero.summon_full_params(model):
        weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    if fabric.is_global_zero:
        model.module.save_pretrained(options.out / "final", state_dict=weights)
        (options.out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
