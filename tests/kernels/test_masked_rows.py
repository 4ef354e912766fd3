"""Rows whose label counts, into a fixed number of places."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.heads import fuse_head
from hf_zero.ops import masked_rows
from hf_zero.ops.masked_rows import GRANULE, RowCapacity, RowCount, select_rows
from tests.integrations.fused.languages import compare, gradients, pair
from tests.late import launch


def batch(tokens: int = 23, share: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 50, (tokens,)).where(torch.rand(tokens) < share, -100)
    return torch.randn(tokens, 6, requires_grad=True), labels


@pytest.mark.parametrize("spare", [None, 0, 5])
def test_labelled_rows_come_in_order_and_their_gradients_go_back(spare: int | None) -> None:
    hidden, labels = batch()
    at = (labels != -100).nonzero()[:, 0]
    rows, kept, lost = select_rows(
        hidden, labels, capacity=None if spare is None else len(at) + spare
    )
    assert torch.equal(rows[: len(at)], hidden[at])
    assert torch.equal(kept[: len(at)], labels[at])
    assert lost == 0
    assert kept.shape == (len(at) + (spare or 0),)
    assert (kept[len(at) :] == -100).all()
    assert rows.isfinite().all()
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
    hidden = torch.randn(tokens, 6, requires_grad=True)
    labels = torch.ones(tokens, dtype=torch.int64)
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


class LateCount(torch.Tensor):
    """Pinned memory that a copy reaches when its event is waited for; until then it holds
    nonsense.
    """

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        assert non_blocking
        self.source = source.clone()
        return self.fill_(-(10**6))


class FakeDevice:
    """Host tensors that are taken for a device's, with a stream whose copies are late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pinned: list[LateCount] = []
        monkeypatch.setattr(masked_rows.kinds, "is_host", lambda device: False)
        monkeypatch.setattr(masked_rows.pinned, "empty", self.empty)
        for name in ("side_stream", "current_stream"):
            monkeypatch.setattr(masked_rows.streams, name, lambda *_: self)
        monkeypatch.setattr(masked_rows.streams, "on_stream", lambda stream: nullcontext())
        monkeypatch.setattr(
            masked_rows.streams,
            "record_event",
            lambda stream: SimpleNamespace(synchronize=self.arrive),
        )
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("recorded")
        )

    def empty(self, numel: int, dtype: torch.dtype) -> LateCount:
        self.pinned.append(torch.empty(numel, dtype=dtype).as_subclass(LateCount))
        return self.pinned[-1]

    def wait_stream(self, stream: Any) -> None:
        self.log.append("counting")

    def arrive(self) -> None:
        self.log.append("waited")
        torch.Tensor.copy_(self.pinned[-1], self.pinned[-1].source)


def labelled(tokens: int, share: float) -> torch.Tensor:
    labels = torch.full((tokens,), -100)
    labels[torch.randperm(tokens)[: int(tokens * share)]] = 1
    return labels


def test_a_cpu_is_asked_how_many_rows_there_are() -> None:
    assert RowCapacity().places(RowCount(torch.tensor([1, -100, 2])), torch.device("cpu")) == 2


def test_labels_of_the_host_are_counted_there_for_a_model_on_a_device() -> None:
    # and no stream is asked for
    assert RowCapacity().places(RowCount(labelled(4096, 0.1)), torch.device("cuda")) == 512


def test_places_follow_the_count_of_each_batch_and_stay_where_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeDevice(monkeypatch)
    capacity = RowCapacity()

    def places(share: float, tokens: int = 1024) -> int:
        return capacity.places(RowCount(labelled(tokens, share)), torch.device("cuda"))

    assert [places(0.1) for _ in range(12)] == [128] * 12
    assert [places(share) for share in (0.4, 0.5, 0.0, 1.0, 0.1)] == [512, 512, GRANULE, 1024, 128]
    assert places(0.5, tokens=20) == 20
    about = [places(0.15 + 0.01 * (-1) ** step, tokens=32_768) for step in range(8)]
    assert len({*about}) == 1 and 0.16 * 32_768 <= about[0] < 0.16 * 32_768 + GRANULE


def test_a_copy_counts_for_itself() -> None:
    capacity = RowCapacity()
    capacity.places(RowCount(labelled(4096, 0.5)), torch.device("cuda"))
    assert (
        copy.deepcopy(capacity).places(RowCount(labelled(4096, 0.45)), torch.device("cuda")) == 1920
    )


def test_a_head_on_a_device_loses_no_row_whatever_the_batch_before_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, fused = pair("bert")
    assert not isinstance(fuse_head(fused), str)
    device = FakeDevice(monkeypatch)
    monkeypatch.setattr(masked_rows, "GRANULE", 8)
    rows: list[int] = []
    fused.cls.predictions.transform.register_forward_pre_hook(
        lambda module, given: rows.append(given[0].shape[0])
    )
    fused.bert.register_forward_pre_hook(lambda module, given: device.log.append("body"))
    for share in (0.1, 0.4, 0.5, 0.0, 0.1):
        ids = torch.randint(3, 60, (4, 20))
        given = {
            "input_ids": ids,
            "labels": ids.where(labelled(80, share).view(4, 20) != -100, -100),
        }
        device.log.clear()
        losses = []
        for model in (plain, fused):
            model.zero_grad()
            losses.append(model(**given).loss)
            losses[-1].backward()
        assert device.log == ["counting", "recorded", "body", "waited"]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6, equal_nan=True)
        if share:
            compare(gradients(fused), gradients(plain))
        else:
            assert losses[1].isnan() and not any(each.any() for each in gradients(fused).values())
    assert rows == [8, 32, 40, 8, 8]


def test_on_a_simulated_device_the_count_is_ordered_and_nothing_else_is_waited_for() -> None:
    launch.needs_the_device()
    env = launch.environment(as_cuda=True, HF_ZERO_TRITON="0")
    random, lazy, unordered, early = launch.rows(launch.run("tests.kernels.late_head", env=env))
    for right in (random, lazy):
        assert right["reports"] == [] and right["waits"] == 0 and right["worst"] < 1e-5
        assert right["rows"] == [8, 8, 32, 40, 8, 8, 8]
    assert "race" in [kind for kind, _ in unordered["reports"]] and unordered["dropped"]
    assert "host" in [kind for kind, _ in early["reports"]] and early["dropped"]
