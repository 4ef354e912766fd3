"""Rows whose label counts, into a fixed number of places."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.ops.masked_rows import GRANULE, RowCapacity, select_rows


def batch(tokens: int = 23, share: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 50, (tokens,)).where(torch.rand(tokens) < share, -100)
    return torch.randn(tokens, 6, requires_grad=True), labels


@pytest.mark.parametrize("spare", [None, 0, 5])
def test_labelled_rows_come_in_order_and_their_gradients_go_back(spare: int | None) -> None:
    hidden, labels = batch()
    at = (labels != -100).nonzero()[:, 0]
    rows, kept, lost = select_rows(hidden, labels, capacity=None if spare is None else len(at) + spare)
    assert torch.equal(rows[: len(at)], hidden[at]) and torch.equal(kept[: len(at)], labels[at]) and lost == 0
    assert kept.shape == (len(at) + (spare or 0),) and (kept[len(at) :] == -100).all() and rows.isfinite().all()
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


@pytest.mark.parametrize(("tokens", "capacity"), [(0, 0), (0, 4), (5, 0)])
def test_nothing_to_select_or_nowhere_to_put_it(tokens: int, capacity: int) -> None:
    hidden, labels = torch.randn(tokens, 6, requires_grad=True), torch.ones(tokens, dtype=torch.int64)
    rows, kept, lost = select_rows(hidden, labels, capacity=capacity)
    assert rows.shape == (capacity, 6) and (kept == -100).all() and lost == tokens
    assert torch.equal(torch.autograd.grad(rows.sum(), hidden)[0], torch.zeros(tokens, 6))


def test_the_operator_passes_opcheck() -> None:
    hidden, labels = batch()
    torch.library.opcheck(torch.ops.hf_zero.select_rows.default, (hidden, labels, -100, 9))


@pytest.mark.parametrize(
    ("labels", "capacity", "says"),
    [
        (torch.zeros(3, dtype=torch.int64), 2, r"hidden \(4, 6\) with labels \(3,\)"),
        (torch.zeros(4, dtype=torch.int64, device="meta"), 2, "labels are on meta"),
        (torch.zeros(4, dtype=torch.int64), -1, "capacity=-1"),
    ],
)
def test_what_does_not_fit_is_named(labels: torch.Tensor, capacity: int, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        select_rows(torch.zeros(4, 6), labels, capacity=capacity)


class Elsewhere(torch.Tensor):
    """Labels that say they are on a GPU."""

    device = SimpleNamespace(type="cuda")  # type: ignore[assignment]


def elsewhere(tokens: int, labelled: int) -> torch.Tensor:
    labels = torch.full((tokens,), -100)
    labels[:labelled] = 1
    return labels.as_subclass(Elsewhere)


def arrive(capacity: RowCapacity, lost: int, places: int, tokens: int, arrived: bool = True) -> None:
    capacity._pending.append((SimpleNamespace(query=lambda: arrived), torch.tensor(lost), places, tokens))  # type: ignore[arg-type]


def test_a_cpu_is_asked_how_many_rows_there_are() -> None:
    assert RowCapacity().places(torch.tensor([1, -100, 2])) == 2


def test_the_first_batch_is_waited_for_and_sets_the_share() -> None:
    rare, dense = RowCapacity(), RowCapacity()
    assert rare.places(elsewhere(4096, 600)) == 1024 and rare.places(elsewhere(2048, 2000)) == 512
    assert dense.places(elsewhere(4096, 2000)) == -(-2500 // GRANULE) * GRANULE and dense.places(elsewhere(100, 1)) == 100


def test_rows_that_were_lost_raise_once_that_is_known() -> None:
    capacity = RowCapacity()
    labels = elsewhere(4096, 600)
    capacity.places(labels)
    arrive(capacity, 7, 1024, 4096, arrived=False)
    assert capacity.places(labels) == 1024  # not known yet
    capacity._pending.clear()
    arrive(capacity, 7, 1024, 4096)
    with pytest.raises(KernelError, match=r"7 labelled tokens of a batch of 4096 found no room in the 1024 rows"):
        capacity.places(labels)
    assert capacity.places(labels) > 1031  # whoever goes on has room


def test_a_copy_learns_by_itself() -> None:
    capacity: Any = RowCapacity()
    arrive(capacity, 7, 1024, 4096)
    assert not copy.deepcopy(capacity)._pending
