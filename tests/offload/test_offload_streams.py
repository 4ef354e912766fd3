"""Gradients on their way to host memory, over streams that are played. tests/late shows the order
of a whole engine, tests/gpu/test_offload_on_gpu.py the numbers.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_zero.offload.gradient_offload import STAGED, UNDER_WAY, GradientOffload
from hf_zero.ops import host
from hf_zero.zero.gather.shared_shards import shard_bytes_of
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec
from tests.helpers.accelerators import play_streams

CPU = torch.device("cpu")


class Flat:
    """A gradient in host memory, which holds NaN."""

    key = "layers.0|trainable|float32"

    def __init__(self, numel, dtype=torch.float32):
        self.shard = torch.full((numel,), float("nan"), dtype=dtype)


def made(device=CPU):
    return GradientOffload(device, lambda numel, dtype: torch.empty(numel, dtype=dtype))


@pytest.fixture
def offload(monkeypatch):
    play_streams(monkeypatch)
    return made()


@pytest.mark.parametrize(("accumulate", "most"), [(False, UNDER_WAY), (True, STAGED)])
def test_each_copy_follows_its_gradient_and_the_host_is_a_few_ahead(monkeypatch, accumulate, most):
    """Of different sizes, which take turns in the buffers for what the host has to add."""
    played, offload = play_streams(monkeypatch, prompt=False), made()
    flats = [Flat(numel) for numel in (600, 400, 200, 700, 100, 300, 500)]
    for each in flats:
        each.shard.zero_()
    expected = [each.shard.clone() for each in flats]
    for step in range(3):
        for index, each in enumerate(flats):
            values = torch.arange(each.shard.numel()) % 7.0 + step + index
            expected[index] = values + (expected[index] if accumulate else 0)
            sent = len(played.events)
            offload.send(each, values, accumulate)
            waits = [entry for entry in played.log if entry[0] != "host waits"]
            assert waits == [("side 1", "waits for", "compute")] * (sent + 1)
            over = [event.over for event in played.events]
            assert over == [True] * max(0, sent + 1 - most) + [False] * min(sent + 1, most)
            assert offload.event(each) is played.events[-1] and offload.is_adding is accumulate
    offload.wait()
    assert all(event.over for event in played.events) and len(offload._staging) <= STAGED
    for each, sums in zip(flats, expected):
        assert torch.equal(each.shard, sums)


def test_another_dtype_is_cast_into_place(offload, monkeypatch):
    wire = torch.bfloat16
    calls: list[str] = []
    for name in ("accumulate", "cast"):
        own = getattr(host, name)
        monkeypatch.setattr(
            host, name, lambda *args, own=own, name=name: (calls.append(name), own(*args))
        )
    here = Flat(1000)  # what it holds is NaN: nothing may be added to it
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_in_another_dtype_are_rounded_once(offload, dtype):
    here, wide = Flat(1000, dtype), torch.promote_types(dtype, torch.float32)
    begun, more = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    offload.send(here, begun, accumulate=False)
    offload.send(here, more, accumulate=True, scale=0.25)
    offload.wait()
    assert torch.equal(here.shard, (begun.to(wide) + 0.25 * more.to(wide)).to(dtype))


def test_what_was_sent_is_kept_until_it_has_been_copied_and_no_longer_when_all_is_over(offload):
    flats, kept = [Flat(64) for _ in range(UNDER_WAY)], []
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


def test_another_rank_that_fetches_right_after_an_update_waits_for_its_copies():
    """The wait of the stream that computes is not one for the thread that serves the others."""
    waited: list[str] = []
    layout = FlatLayout.build([], 1)
    spec = FlatSpec(0, "", layout, torch.float32, True, False, False, True, (2, 4))
    spec = replace(spec, mesh=SimpleNamespace(shard=None))
    flat = FlatBuffer(spec, {}, EngineFlats(SimpleNamespace()))
    flat.use_full(torch.arange(4.0))
    unit = SimpleNamespace(sharded_flats=[flat])
    expected = flat.shard.numpy().tobytes()
    assert shard_bytes_of(unit) == expected and not waited
    flat.optimizer_shard.begin_update(lambda: None, Future())
    flat.end_update(SimpleNamespace(synchronize=lambda: waited.append("copied")))
    assert not flat.optimizer_shard.has_update
    assert shard_bytes_of(unit) == expected and waited == ["copied"]
