"""Who waits for whom on a GPU under offload, shown without one: the recorded schedule, replayed
with one party slow, keeps the order.

tests/gpu/test_offload_on_gpu.py shows the numbers.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_zero.offload.gradient_offload import UNDER_WAY
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec
from tests.helpers.training import trainable

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
BLOCKS = 8


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCH))
    try:
        import offload_model
        import offload_replay
        import offload_schedule

        yield SimpleNamespace(
            model=offload_model, replay=offload_replay, schedule=offload_schedule, made={}
        )
    finally:
        sys.path.remove(str(BENCH))


def recorded(bench, name, make=None):
    key = name, make
    if key not in bench.made:
        shape = replace(bench.model.LLAMA_3B, blocks=BLOCKS)
        more = {} if make is None else {"make": make}
        bench.made[key] = bench.model.record(shape, bench.model.CASES[name], **more)
    return bench.made[key]


def rmsprop(model):
    """It steps itself, and so on the thread that trains."""
    return torch.optim.RMSprop(trainable(model), lr=1e-3)


def of(result, resource, label):
    return sorted(
        (span for span in result.spans if span.resource == resource and span.label == label),
        key=lambda span: span.start,
    )


def test_another_rank_that_fetches_right_after_an_update_waits_for_its_copies():
    """The wait of the stream that computes is not one for the thread that serves the others."""
    waited: list[str] = []
    layout = FlatLayout.build([], 1)
    spec = FlatSpec(0, "", layout, torch.float32, True, False, False, True, (2, 4))
    flat = FlatBuffer(spec, {}, EngineFlats(SimpleNamespace()))
    flat.use_full(torch.arange(4.0))
    assert flat.shard_for_others().tolist() == [2.0, 3.0] and not waited
    flat.optimizer_shard.begin_update(lambda: None, Future())
    flat.end_update(SimpleNamespace(synchronize=lambda: waited.append("copied")))
    assert flat.optimizer_shard.finish_update is None
    assert flat.shard_for_others().tolist() == [2.0, 3.0] and waited == ["copied"]


SLOW = {
    "nobody": {},
    "gradients": {"d2h": 1e8},
    "parameters": {"h2d": 1e8},
    "compute": {"flops": 4e12},
    "host": {"host": 4e9},
}


@pytest.mark.turns
@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize(
    "name, make",
    [
        ("cpu fp32", None),
        ("cpu fp32", rmsprop),
        ("cpu fp32, in backward", None),
        ("all on cpu", None),
        ("all on cpu", rmsprop),
        ("all in files", None),
    ],
)
def test_nobody_reads_what_has_not_come(bench, name, make, slow):
    machine = replace(bench.model.H200, flops=4e14, disk_read=2e12, disk_write=2e12)
    result = bench.replay.replay(recorded(bench, name, make), replace(machine, **SLOW[slow]))
    steps, away = bench.model.RECORDED, name.startswith("all")
    for block in range(BLOCKS):
        unit = f"model.layers.{block}"
        forward, backward = (
            of(result, "GPU", f"forward {unit}"),
            of(result, "GPU", f"backward {unit}"),
        )
        home, came = of(result, "D2H", unit), of(result, "H2D", unit)
        updates = sorted(
            (
                span
                for span in result.spans
                if span.resource == "CPU" and span.label.rpartition(" ")[0] == unit
            ),
            key=lambda s: s.start,
        )
        pieces = len(updates) // steps
        assert len(forward) == len(backward) == len(home) == steps
        for step in range(steps):
            assert home[step].start >= backward[step].end, "its gradients are complete"
            mine = updates[step * pieces : (step + 1) * pieces]
            assert mine[0].start >= home[step].end, "the update reads gradients that have come"
            copies = [
                span
                for span in came
                if span.start >= mine[0].start
                and (step + 1 == steps or span.start < updates[(step + 1) * pieces].start)
            ]
            if step + 1 < steps:
                assert max(span.end for span in mine) <= forward[step + 1].start, (
                    "a forward sees the whole update"
                )
                assert copies, "new parameters come to the GPU"
                # sharded, it comes once more for the backward
                read = copies[:1] if away else copies
                assert max(span.end for span in read) <= forward[step + 1].start, (
                    "a forward reads parameters that have come"
                )
            if away:
                assert all(span.start >= mine[-1].end for span in copies), (
                    "no shard leaves the memory that an update writes"
                )


@pytest.mark.parametrize("name", ["cpu fp32", "all on cpu"])
def test_gradients_leave_as_they_are_made(bench, name):
    """Each one right behind its backward, and the host not more than a few of them ahead of the
    GPU.
    """
    ops = [
        op
        for op in recorded(bench, name).threads["train"]
        if op.kind == "launch" or op.kind == "sync"
    ]
    sent = [op.label for op in ops if op.what == "d2h"]
    blocks = [f"model.layers.{block}" for block in reversed(range(BLOCKS))]
    assert sent == [*blocks, "(root)"] * bench.model.RECORDED
    made = [
        op.label.removeprefix("backward ")
        for op in ops
        if op.what in ("kernel", "d2h")
        and op.label.startswith(("backward model.layers", "model.layers"))
    ]
    assert made[: 2 * BLOCKS] == [label for block in blocks for label in (block, block)]
    arrived, under_way = set(), []
    for op in ops:
        if op.what == "d2h":
            under_way.append(op)
            assert len(under_way) <= UNDER_WAY
        elif op.kind == "sync" and under_way and op.event not in arrived:
            arrived.add(op.event)
            under_way.pop(0)
