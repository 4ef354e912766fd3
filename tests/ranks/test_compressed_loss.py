"""Effect of few bits on the loss: a small language model on real text, with and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan

TEXT = Path(__file__).resolve().parents[2] / "hf_zero"
WIDTH, LENGTH, ROWS, STEPS, LAST = 64, 64, 4, 200, 40
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dense": (2, {}, {}),
    "4 bits both ways": (2, {}, {"compressed_communication": {"bits": 4}}),
    "stage 3, 4 bits up, 8 down": (
        3,
        {"zero_quantized_gradients": True, "zero_quantized_weights": True},
        {},
    ),
    "4 bits up, a scale for 1024, errors fed back": (
        2,
        {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}},
        {"compressed_communication": {"block_size": 1024}},
    ),
}


class Language(nn.Module):
    """A transformer of two layers over bytes; returns the loss of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 128)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        given, wanted = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.embed(given) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def losses(way: str, ranks: int, data: torch.Tensor) -> float:
    """The mean over the last steps and all ranks."""
    stage, zero, more = WAYS[way]

    def run(rank: int, model: nn.Module) -> float:
        config = config_of(stage, Plan(), **more)
        config["zero_optimization"].update(stage3_param_persistence_threshold=0, **zero)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
        engine, seen = start(model, optimizer, config), []
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 24)
            places = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator)
            loss = engine(torch.stack([data[at : at + LENGTH + 1] for at in places.tolist()]))
            engine.backward(loss)
            engine.step()
            seen.append(float(loss.detach()))
        return sum(seen[-LAST:]) / LAST

    models = [seeded(Language) for _ in range(ranks)]
    # half a minute of one core, and as much longer as others have it
    return sum(run_ranks(ranks, lambda rank: run(rank, models[rank]), timeout=900)) / ranks


@pytest.mark.long
def test_the_loss_is_that_of_dense_training():
    text = "".join(path.read_text() for path in sorted(TEXT.glob("*/README.md")))
    data = torch.tensor([byte for byte in text.encode() if byte < 128])
    dense = losses("dense", 2, data)
    assert dense < 3.2, "it learns"
    for way in list(WAYS)[1:]:
        assert abs(losses(way, 2, data) - dense) < 0.03, way
