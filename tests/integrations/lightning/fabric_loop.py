"""A loop of Fabric with accumulation, clipping, a save and a load, beside plain torch on the whole
batches: ``python fabric_loop.py STAGE FOLDER``, alone or by torchrun. Prints "equal" on rank 0.
"""

from __future__ import annotations

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.utils import clip_grad_norm_

SAVED, LAST, MICRO, ROWS, LIMIT = 4, 6, 2, 4, 0.05
DATA = torch.randn(LAST * MICRO * ROWS, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def batch(step: int, micro: int) -> torch.Tensor:
    return DATA[(step * MICRO + micro) * ROWS :][:ROWS]


def plain() -> tuple[nn.Module, list[float], list[float]]:
    """Return the model, the losses of its micro-batches and the norms of its steps."""
    model, losses, norms = network(), [], []
    optimizer = adamw(model)
    for step in range(LAST):
        for micro in range(MICRO):
            loss = model(batch(step, micro)).square().mean()
            (loss / MICRO).backward()
            losses.append(loss.item())
        norms.append(clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, norms


def main(stage: int, folder: str) -> None:
    wanted, losses, norms = plain()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=f"zero_stage_{stage}")
    fabric.launch()
    with fabric.init_module():
        model = network()
    model, optimizer = fabric.setup(model, adamw(model))
    share = ROWS // ranks

    def train(begin: int, end: int) -> tuple[list[float], list[float]]:
        found, lengths = [], []
        for step in range(begin, end):
            for micro in range(MICRO):
                rows = batch(step, micro)[fabric.global_rank * share :][:share]
                with fabric.no_backward_sync(model, enabled=micro < MICRO - 1):
                    loss = model(rows).square().mean()
                    fabric.backward(loss / MICRO)
                found.append(fabric.all_reduce(loss.detach()).item())
            lengths.append(fabric.clip_gradients(model, optimizer, max_norm=LIMIT).item())
            optimizer.step()
            optimizer.zero_grad()
        return found, lengths

    first = train(0, SAVED)
    fabric.save(folder, {"model": model, "optimizer": optimizer, "step": SAVED})
    second = train(SAVED, LAST)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(folder, state) == {} and state["step"] == SAVED
    assert train(SAVED, LAST) == second, "a resume changes the losses"

    fabric.backward(model(batch(0, 0)).sum())  # dropped
    optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), f"{name} was updated by a dropped gradient"
        torch.testing.assert_close(value, wanted.state_dict()[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(first[0] + second[0]), torch.tensor(losses))
    torch.testing.assert_close(
        torch.tensor(first[1] + second[1]), torch.tensor(norms), rtol=1e-5, atol=1e-6
    )
    fabric.print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
