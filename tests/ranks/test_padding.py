"""Padding between the parameters of flat buffers, in models with odd sizes."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_ranks
from tests.helpers.training import Plan


class Odd(nn.Module):
    """Vectors of odd sizes in front of matrices, one of which has blocks of optimizer state."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(nn.Linear(67, 67) for _ in range(3))
        self.last = nn.Linear(67, 5)

    def forward(self, rows):
        for block in self.blocks:
            rows = rows + torch.tanh(block(rows)) * self.scales[0]
        return self.last(rows) * self.scales[1:].prod()


momentum = partial(torch.optim.SGD, momentum=0.9)


def groups_of(model):
    """Those without weight decay first, as timm and open_clip have them."""
    every = list(model.parameters())
    vectors, matrices = ([p for p in every if (p.dim() > 1) == flag] for flag in (False, True))
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]


def rows_of(number):
    return torch.randn(4, 67, generator=torch.Generator().manual_seed(number))


@in_turn(
    ("ranks", "stage", "plan", "optimizer_of"),
    [
        (1, 0, Plan(accumulation=2), torch.optim.AdamW),
        (3, 1, Plan(precision="bf16", accumulation=2), torch.optim.AdamW),
        (
            2,
            2,
            Plan(precision="bf16", accumulation=2, clip=0.1),
            partial(torch.optim.SGD, momentum=0.9),
        ),
        (3, 3, Plan(clip=0.1), torch.optim.AdamW),
    ],
)
def test_matrices_are_aligned_and_padding_stays_zero(ranks, stage, plan, optimizer_of):
    """Buffers of gradients are used again, so zeros have to be written."""

    def run(rank, model):
        engine = start(model, optimizer_of(groups_of(model), lr=1e-3), config_of(stage, plan))
        checked = 0
        for number in range(3 * plan.accumulation):
            rows = rows_of(100 * number + rank).to(plan.dtype)
            engine.backward(engine(rows).float().square().mean())
            for flat in engine.flats:
                own = flat.optimizer_shard
                held = {"shard": flat.shard, "master": own.master, "gradient": flat.gradient.shard}
                held |= engine.bound.tensors(own)
                for first, last in flat.layout.padding_in(*flat.owned):
                    for name, tensor in held.items():
                        if tensor is not None:
                            assert not tensor[first:last].any(), (name, flat.key, number)
                            checked += last - first
                for slot in flat.layout.slots:
                    aligned = slot.offset * flat.dtype.itemsize % 128 == 0
                    assert aligned or len(slot.shape) < 2, slot
            engine.step()
        return checked, float(engine.get_global_grad_norm())

    answers = on_ranks(ranks, run, build=lambda: seeded(Odd))
    assert sum(checked for checked, _ in answers) > 0
    assert len({norm for _, norm in answers}) == 1 and answers[0][1] > 0
