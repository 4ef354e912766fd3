"""Gradients on their way from a device to host memory, with streams that are played: order,
sums, casts, and what is kept.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_zero.offload.gradient_offload import STAGED, UNDER_WAY, GradientOffload
from hf_zero.ops import host
from tests.helpers.accelerators import play_streams

CPU = torch.device("cpu")


def flat(numel, dtype=torch.float32):
    made = SimpleNamespace(
        key="layers.0|trainable|float32", shard=torch.full((numel,), float("nan"), dtype=dtype)
    )
    return type("FlatOf", (), {"__hash__": object.__hash__, **vars(made)})()


@pytest.fixture
def offload(monkeypatch):
    play_streams(monkeypatch)
    return GradientOffload(CPU, lambda numel, dtype: torch.empty(numel, dtype=dtype))


def test_buffers_of_different_sizes_take_turns(offload):
    flats = [flat(numel) for numel in (600, 400, 200, 700, 100, 300, 500, 800, 250, 350)]
    expected = [torch.zeros(each.shard.numel()) for each in flats]
    for each in flats:
        each.shard.zero_()
    for step in range(3):
        for index, each in enumerate(flats):
            values = torch.arange(each.shard.numel(), dtype=torch.bfloat16) % 7 + step + index
            expected[index] += values.float()
            offload.send(each, values, accumulate=True)
    offload.wait()
    for each, sums in zip(flats, expected):
        assert torch.equal(each.shard, sums)
    assert len(offload._staging) <= STAGED


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_another_dtype_is_cast_into_place(offload, wire, monkeypatch):
    calls: list[str] = []
    for name in ("accumulate", "cast"):
        own = getattr(host, name)
        monkeypatch.setattr(
            host, name, lambda *args, own=own, name=name: (calls.append(name), own(*args))
        )
    here = flat(1000)  # what it holds is NaN: nothing may be added to it
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: pytest.fail("zeroed, to be added to"))
    offload.send(here, torch.arange(1000).to(wire), accumulate=False)
    assert offload.is_adding
    offload.wait()
    assert torch.equal(here.shard, torch.arange(1000).to(wire).float()) and calls == ["cast"]
    offload.send(here, torch.ones(1000, dtype=wire), accumulate=True, scale=0.25)
    offload.wait()
    assert torch.equal(here.shard, torch.arange(1000).to(wire).float() + 0.25) and calls == [
        "cast",
        "accumulate",
    ]


def test_64_bits_are_added_and_cast(offload):
    here = flat(10, torch.float64)
    offload.send(here, torch.full((10,), 4.0), accumulate=False, scale=0.5)
    offload.send(here, torch.full((10,), 1e-12, dtype=torch.float64), accumulate=True)
    offload.wait()
    assert torch.equal(here.shard, torch.full((10,), 2.0, dtype=torch.float64) + 1e-12)


def test_what_was_sent_is_kept_until_it_has_been_copied_and_no_longer_when_all_is_over(offload):
    flats, kept = [flat(64) for _ in range(UNDER_WAY)], []
    for each in flats:
        values = torch.ones(64)
        kept.append(weakref.ref(values))
        offload.send(each, values, accumulate=False)
        del values
    assert all(reference() is not None for reference in kept)
    for each in flats:
        each.shard = None  # the engine is being destroyed
    offload.close()
    gc.collect()
    assert not any(reference() is not None for reference in kept)
    offload.wait()
