"""Tiled computation: values and gradients of the function on the whole sequence, with what it
keeps for the backward cut down to one stretch.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, full_grads
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.training import adamw

ulysses: Any = deepspeed.runtime.sequence_parallel.ulysses_sp
HIDDEN, WORDS, LENGTH, SHARDS = 8, 11, 13, 4


def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.down(torch.relu(module.up(x)))
    return found


def token_loss(module: Any, x: torch.Tensor, y: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.cross_entropy(module.head(x), y, reduction="none")
    return (losses * mask[0]).sum() if mask else losses.sum()


class Tiled(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.way == "plain":
            return token_loss(self, mlp(self, x).flatten(0, 1), y.flatten())
        if self.way == "generic":
            given = ({"x": x}, {"module": self}, "x")
            x = ulysses.sequence_tiled_compute(
                lambda x, module: mlp(module, x), LENGTH, SHARDS, *given, output_reduction=None
            )
        else:
            x = ulysses.TiledMLP.apply(mlp, self, x, SHARDS, list(self.parameters()))
        mask = torch.ones_like(y) if self.way == "mask" else None
        loss: torch.Tensor = ulysses.TiledFusedLogitsLoss.apply(
            token_loss, self, x, y, mask, SHARDS, None, "sum"
        )
        return loss


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(2, LENGTH, HIDDEN, generator=draw)
    return x.requires_grad_(), torch.randint(WORDS, (2, LENGTH), generator=draw)


@in_one_item([(2, "tiled"), (3, "tiled"), (3, "mask"), (3, "generic")])
def test_tiles_have_the_gradients_of_the_whole(case: tuple[int, str]) -> None:
    stage, way = case
    plain, inputs = Tiled("plain"), []
    for rank in range(2):
        x, y = given(rank)
        (plain(x, y) / 2).backward()
        assert x.grad is not None
        inputs.append(x.grad * 2)
    want = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    models = [Tiled(way) for _ in range(2)]

    def run(rank: int) -> None:
        model = models[rank]
        config = config_of(stage)
        engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
        for _ in range(2):
            x, y = given(rank)
            engine.backward(engine(x, y))
            compare_tensors("gradients", full_grads(engine), want)
            torch.testing.assert_close(x.grad, inputs[rank])
            engine.zero_grad()
        engine.destroy()

    run_ranks(2, run)


def test_logits_of_one_tile_at_a_time_are_kept() -> None:
    kept: list[int] = []

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    found = {}
    for way in ("plain", "tiled"):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            Tiled(way)(*given(0))
        found[way] = 2 * LENGTH * WORDS in kept
    assert found == {"plain": True, "tiled": False}


def test_means_of_tiles_and_scalars() -> None:
    x = torch.arange(12.0).reshape(2, 6)
    apart = ulysses.sequence_tiled_compute(
        lambda x: x.sum(), 6, 4, {"x": x}, {}, "x", None, 0, "mean"
    )
    assert apart == x.sum() / 3
    same = ulysses.SequenceTiledCompute.apply(
        lambda x, add: (x + add).sum(), 6, 3, ["x"], ["add"], "x", None, 0, "sum", x, 1.0
    )
    assert same == x.sum() + 12
    joined = ulysses.sequence_tiled_compute(
        lambda x: x.mT, 6, 3, {"x": x[..., None]}, {}, "x", None, 2, None
    )
    assert torch.equal(joined, x[:, None])
