"""Expressions of weights that are quantized in blocks while they are read."""

from __future__ import annotations

import pytest
import torch

from hf_zero.loading import expressions
from hf_zero.loading.expressions import InBlocks, InMemory, OneOf, Strided, Together

BLOCK = 8


class Counted(InMemory):
    """Counts the elements that are read."""

    read_elements = 0

    def read(self, start: int, out: torch.Tensor) -> None:
        self.read_elements += out.numel()
        super().read(start, out)


def packed(values: torch.Tensor) -> torch.Tensor:
    """Two elements in one, by the largest of their block."""
    whole = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scaled = whole / whole.abs().amax(1, keepdim=True)
    return (scaled[:, ::2] + 2 * scaled[:, 1::2]).reshape(-1)[: -(-len(values) // 2)]


@pytest.mark.parametrize("numel", [64, 61, 7])
def test_each_range_is_that_of_the_whole(monkeypatch, numel):
    monkeypatch.setattr(expressions, "ELEMENTS", 3 * BLOCK)
    source = torch.randn(numel)
    want, made = packed(source), -(-numel // 2)
    base = Counted(source)
    found = InBlocks(base, packed, BLOCK, BLOCK // 2, (made, 1), torch.float32)
    assert found.sliceable and torch.equal(found.whole().view(-1), want)
    for start in range(made + 1):
        for stop in range(start, made + 1):
            out, base.read_elements = torch.empty(stop - start), 0
            found.read(start, out)
            assert torch.equal(out, want[start:stop])
            assert base.read_elements <= 2 * (stop - start) + 2 * BLOCK


def test_a_source_that_is_not_sliceable_is_read_once_for_a_range(monkeypatch):
    monkeypatch.setattr(expressions, "ELEMENTS", BLOCK)
    base = Counted(torch.randn(8, 8))
    turned = Strided(base, (8, 8), (1, 8), 0)
    found = InBlocks(turned, packed, BLOCK, BLOCK // 2, (32,), torch.float32)
    assert not found.sliceable
    assert torch.equal(found.whole(), packed(base.whole().T.reshape(-1)))
    assert base.read_elements == 2 * 64


def test_tensors_of_one_computation_are_computed_once_and_dropped_when_read():
    calls = []

    def compute():
        calls.append(1)
        return {"one": torch.arange(4), "other": torch.tensor(2.5)}

    together = Together(compute)
    one = OneOf(together, "one", (4,), torch.int64)
    out = torch.empty(2, dtype=torch.int64)
    one.read(1, out)
    assert out.tolist() == [1, 2]
    assert OneOf(together, "other", (), torch.float32).whole().item() == 2.5
    assert len(calls) == 1 and one.whole().tolist() == [0, 1, 2, 3] and len(calls) == 2
