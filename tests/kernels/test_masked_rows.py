"""Rows whose label counts, into a fixed number of places."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from hf_zero.ops.masked_rows import GRANULE, RowCapacity, select_rows


def batch(tokens: int = 23, share: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 50, (tokens,)).where(torch.rand(tokens) < share, -100)
    labels[0] = 7  # which an empty place is not to count
    return torch.randn(tokens, 6, requires_grad=True), labels


def test_labeled_rows_come_in_order_and_their_gradients_go_back() -> None:
    for spare in (0, 5):
        hidden, labels = batch()
        at = (labels != -100).nonzero()[:, 0]
        rows, kept, lost = select_rows(hidden, labels, capacity=len(at) + spare)
        assert torch.equal(rows[: len(at)], hidden[at]) and rows.isfinite().all()
        assert torch.equal(kept[: len(at)], labels[at]) and lost == 0
        assert kept.shape == (len(at) + spare,) and (kept[len(at) :] == -100).all()
        above = torch.randn_like(rows)
        above[len(at) :] = 0  # an ignored row has none
        (found,) = torch.autograd.grad(rows, hidden, above)
        assert torch.equal(found, torch.zeros_like(hidden).index_copy(0, at, above[: len(at)]))


def test_rows_without_a_place_are_counted() -> None:
    hidden, labels = batch()
    at = (labels != -100).nonzero()[:, 0]
    rows, kept, lost = select_rows(hidden, labels, capacity=len(at) - 2)
    assert lost == 2 and torch.equal(rows, hidden[at[:-2]]) and torch.equal(kept, labels[at[:-2]])
    (found,) = torch.autograd.grad(rows.sum(), hidden)
    assert torch.equal(found.any(1).nonzero()[:, 0], at[:-2])
    for tokens, capacity in ((0, 0), (0, 4), (5, 0)):
        hidden = torch.randn(tokens, 6, requires_grad=True)
        labels = torch.ones(tokens, dtype=torch.int64)
        rows, kept, lost = select_rows(hidden, labels, capacity=capacity)
        assert rows.shape == (capacity, 6) and (kept == -100).all() and lost == tokens
        assert not torch.autograd.grad(rows.sum(), hidden)[0].any()


def counted(tokens: int, share: float) -> Any:
    """The count of ``share`` of so many tokens."""
    return SimpleNamespace(tokens=tokens, read=lambda: int(tokens * share))


def test_places_follow_the_count_of_each_batch_and_stay_where_it_does() -> None:
    """A copy has its own."""
    capacity = RowCapacity()
    assert capacity.places(counted(4096, 0.1)) == 512
    capacity.places(counted(4096, 0.5))
    assert copy.deepcopy(capacity).places(counted(4096, 0.45)) == 1920
    capacity = RowCapacity()

    def places(share: float, tokens: int = 1024) -> int:
        return capacity.places(counted(tokens, share))

    assert [places(0.1) for _ in range(12)] == [128] * 12
    assert [places(share) for share in (0.4, 0.5, 0.0, 1.0, 0.1)] == [512, 512, GRANULE, 1024, 128]
    assert places(0.5, tokens=20) == 20
    about = [places(0.15 + 0.01 * (-1) ** step, tokens=32_768) for step in range(8)]
    assert len({*about}) == 1 and 0.16 * 32_768 <= about[0] < 0.16 * 32_768 + GRANULE
