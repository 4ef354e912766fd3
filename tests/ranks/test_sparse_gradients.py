"""Sparse gradients of embeddings: the numbers are those of dense ones, and the log says once
that they are made dense.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_ranks


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids)).square().mean()


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.tensor([step, rank, 5])


@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_gradient_counts_as_a_dense_one_and_is_named_once(stage, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        "hf_zero.zero.reduce.reductions.log_rank0", lambda message, level: said.append(message)
    )
    model = seeded(Words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        (sum(model(ids_of(step, rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(rank, model):
        engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), config_of(stage))
        for step in range(2):
            engine.backward(engine(ids_of(step, rank)))
            engine.step()
        return full_weights(engine)

    got = on_ranks(2, run, build=lambda: seeded(Words))[0]
    oracle.compare_tensors(
        "weights", got, {name: p.detach() for name, p in model.named_parameters()}
    )
    assert len(said) == 2, "one of each rank's engine, of which rank 0's is logged"
    assert all("words.weight" in text for text in said)
