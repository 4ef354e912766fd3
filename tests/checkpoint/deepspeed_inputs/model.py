"""The training that write.py did under the real DeepSpeed, and that the tests take up again.

Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, WIDTH, LENGTH, GLOBAL_BATCH, SAVED_AFTER, STEPS = 11, 5, 4, 6, 3, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale.to(x.dtype)


class Model(nn.Module):
    """Tied weights, a buffer, and, if asked for, parameters that are not trained."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False) if frozen else nn.Identity()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(self.frozen(x))).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(frozen: bool) -> Model:
    torch.manual_seed(0)
    return Model(frozen)


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step] * 2)


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of one global batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (GLOBAL_BATCH, LENGTH), generator=generator)
    each = GLOBAL_BATCH // ranks
    mine = ids[rank * each : (rank + 1) * each]
    return mine, mine.roll(1, 1)
