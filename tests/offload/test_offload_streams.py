"""Who waits for whom on a GPU under offload, shown without one: the recorded schedule, replayed
with one party slow, keeps the order; gradients on their way to host memory over streams that are
played. tests/gpu/test_offload_on_gpu.py shows the numbers.
"""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_zero.offload.gradient_offload import STAGED, UNDER_WAY, GradientOffload
from hf_zero.ops import host
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec
from tests.helpers.accelerators import play_streams
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


def seconds(bench, train, update=()):
    """Times of a schedule made by hand: one unit of work takes a second wherever it is done."""
    rates = dict.fromkeys(("h2d", "d2h", "both", "host", "hbm", "flops", "disk_write"), 1.0)
    threads = {"train": [*train, bench.schedule.Op("mark")], "update": [*update]}
    machine = bench.replay.Machine(**rates, disk_read=2.0)
    return bench.replay.replay(bench.schedule.Schedule(threads), machine)


def fence(bench, stream, number):
    """The host waits for all that was launched on ``stream``."""
    Op = bench.schedule.Op
    return [Op("launch", "record", stream, number), Op("sync", event=number)]


def test_the_replay_of_streams(bench):
    """A copy runs beside a kernel unless it waits for it; the two directions share the bus."""
    Op = bench.schedule.Op
    kernel = Op("launch", "kernel", "compute", flops=4.0)
    copy = Op("launch", "h2d", "side", size=3.0)
    beside = [kernel, copy, *fence(bench, "side", 1), *fence(bench, "compute", 2)]
    assert seconds(bench, beside).marks == [pytest.approx(4.0)]
    waits = [Op("launch", "record", "compute", 1), Op("launch", "wait", "side", 1)]
    after = [kernel, *waits, copy, *fence(bench, "side", 2)]
    assert seconds(bench, after).marks == [pytest.approx(7.0)]
    assert seconds(bench, [kernel]).marks == [0.0], "nobody waits for it"
    back = Op("launch", "d2h", "out", size=1.0)
    both = [copy, back, *fence(bench, "out", 1), Op("mark"), *fence(bench, "side", 2)]
    assert seconds(bench, both).marks == [pytest.approx(2.0), pytest.approx(4.0)]


def test_the_replay_of_threads_and_disks(bench):
    """A job begins when it is submitted and is joined when it ends; the disk does first what
    somebody waits for.
    """
    Op = bench.schedule.Op
    work = [Op("launch", "kernel", "compute", flops=each) for each in (2.0, 1.0)]
    train = [work[0], *fence(bench, "compute", 1), Op("submit", event=2), work[1]]
    update = [Op("begin", event=2), Op("host", size=5.0), Op("end", event=2)]
    result = seconds(bench, [*train, Op("join", event=2)], update)
    assert result.marks == [pytest.approx(7.0)]
    assert result.waited["train join"] == pytest.approx(5.0)
    assert result.waited["update begin"] == pytest.approx(2.0)
    behind = [Op("disk", "write", "BEHIND", number, size) for number, size in ((1, 1.0), (2, 4.0))]
    needed = [Op("disk", "read", "NEEDED", 3, 2.0), Op("landed", event=3), Op("mark")]
    marks = seconds(bench, [*behind, *needed, Op("landed", event=2)]).marks
    assert marks == [pytest.approx(1.0), pytest.approx(5.0)]
    with pytest.raises(RuntimeError, match="does not end"):
        seconds(bench, [Op("join", event=1)], [Op("begin", event=1)])


def moved(bench, name):
    """Bytes of a step for each element of a model of four blocks: by direction, of the host's
    update, and by file operation.
    """
    shape = replace(bench.model.LLAMA_3B, blocks=4)
    schedule = bench.model.record(shape, bench.model.CASES[name])
    numel = sum(shape.sizes().values()) * bench.model.RECORDED
    found = {"host": sum(op.size for op in schedule.of("host")) / numel}
    for kind, names in (("launch", ("d2h", "h2d")), ("disk", ("read", "write"))):
        for what in names:
            found[what] = sum(op.size for op in schedule.of(kind) if op.what == what) / numel
    return found


@pytest.mark.parametrize(
    "name, passes",
    [("cpu fp32", 28), ("cpu bf16 moments", 20), ("cpu int8 moments", 16 + 4 * 4 / 256)],
)
def test_bytes_of_the_real_shape(bench, name, passes):
    """Gradients out and parameters in once, in 16 bits; the update passes over its state twice,
    the gradient and the copy once.
    """
    found = moved(bench, name)
    assert (found["d2h"], found["h2d"]) == (pytest.approx(2), pytest.approx(2))
    assert found["host"] == pytest.approx(passes, rel=1e-3)


def test_files_carry_the_state_in_and_out_and_sharded_parameters_come_twice(bench):
    found = moved(bench, "all in files")
    assert found["write"] == pytest.approx(12 + 2, rel=1e-3)
    # the last block is still here when its backward begins, and so is the root
    assert 12 + 2 < found["read"] <= 12 + 4


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
    "gradients": {"d2h": 1e8},
    "parameters": {"h2d": 1e8},
    "compute": {"flops": 4e12},
    "host": {"host": 4e9},
}


@pytest.mark.parametrize(
    "name, make",
    [
        ("cpu fp32", rmsprop),
        ("cpu fp32, in backward", None),
        ("all on cpu", None),
        ("all in files", None),
    ],
)
def test_nobody_reads_what_has_not_come(bench, name, make):
    for slow in SLOW:
        nobody_reads_what_has_not_come(bench, name, make, slow)


def nobody_reads_what_has_not_come(bench, name, make, slow):
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


def test_another_dtype_is_cast_into_place(offload, monkeypatch):
    wire = torch.bfloat16
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
