"""The model of the schedule under offload: its arithmetic on schedules made by hand, and that
the engine's order is what it replays.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench():
    """The modules of scripts/bench."""
    sys.path.insert(0, str(BENCH))
    try:
        import offload_model
        import offload_replay
        import offload_schedule

        yield SimpleNamespace(model=offload_model, replay=offload_replay, schedule=offload_schedule)
    finally:
        sys.path.remove(str(BENCH))


def machine(bench):
    """One unit of work takes a second wherever it is done."""
    return bench.replay.Machine(
        h2d=1.0, d2h=1.0, both=1.0, host=1.0, hbm=1.0, flops=1.0, disk_write=1.0, disk_read=2.0
    )


def seconds(bench, train, update=None):
    schedule = bench.schedule.Schedule(
        {"train": [*train, bench.schedule.Op("mark")], "update": update or []}
    )
    return bench.replay.replay(schedule, machine(bench))


def kernel(bench, flops, stream="compute"):
    return bench.schedule.Op("launch", "kernel", stream, flops=flops)


def copy(bench, direction, size, stream):
    return bench.schedule.Op("launch", direction, stream, size=size)


def fence(bench, stream, number):
    """The host waits for all that was launched on ``stream``."""
    return [
        bench.schedule.Op("launch", "record", stream, number),
        bench.schedule.Op("sync", event=number),
    ]


def test_kernels_follow_each_other_and_are_launched_ahead(bench):
    result = seconds(bench, [kernel(bench, 2.0), kernel(bench, 3.0), *fence(bench, "compute", 1)])
    assert result.marks == [pytest.approx(5.0)]
    assert seconds(bench, [kernel(bench, 2.0)]).marks == [0.0], "nobody waits for it"


def test_a_copy_runs_beside_a_kernel_unless_it_waits_for_it(bench):
    Op = bench.schedule.Op
    beside = [
        kernel(bench, 4.0),
        copy(bench, "h2d", 3.0, "side"),
        *fence(bench, "side", 1),
        *fence(bench, "compute", 2),
    ]
    assert seconds(bench, beside).marks == [pytest.approx(4.0)]
    after = [
        kernel(bench, 4.0),
        Op("launch", "record", "compute", 1),
        Op("launch", "wait", "side", 1),
        copy(bench, "h2d", 3.0, "side"),
    ]
    assert seconds(bench, [*after, *fence(bench, "side", 2)]).marks == [pytest.approx(7.0)]


def test_the_two_directions_share_what_the_bus_takes(bench):
    """3 and 1 at half the rate: the shorter is over after 2 seconds, and then the other has 2
    left at the full rate.
    """
    ops = [
        copy(bench, "h2d", 3.0, "in"),
        copy(bench, "d2h", 1.0, "out"),
        *fence(bench, "out", 1),
        bench.schedule.Op("mark"),
    ]
    assert seconds(bench, [*ops, *fence(bench, "in", 2)]).marks == [
        pytest.approx(2.0),
        pytest.approx(4.0),
    ]


def test_a_job_begins_when_it_is_submitted_and_is_joined_when_it_ends(bench):
    Op = bench.schedule.Op
    train = [
        kernel(bench, 2.0),
        *fence(bench, "compute", 1),
        Op("submit", event=2),
        kernel(bench, 1.0),
        Op("join", event=2),
    ]
    update = [Op("begin", event=2), Op("host", size=5.0), Op("end", event=2)]
    result = seconds(bench, train, update)
    assert result.marks == [pytest.approx(7.0)]
    assert result.waited["train join"] == pytest.approx(5.0)
    assert result.waited["update begin"] == pytest.approx(2.0)


def test_the_disk_does_first_what_somebody_waits_for(bench):
    """A read of 2 at twice the rate goes before the writes, and then the write that is waited
    for before the one asked for earlier.
    """
    Op = bench.schedule.Op
    behind = [Op("disk", "write", "BEHIND", number, size) for number, size in ((1, 1.0), (2, 4.0))]
    train = [
        *behind,
        Op("disk", "read", "NEEDED", 3, 2.0),
        Op("landed", event=3),
        Op("mark"),
        Op("landed", event=2),
    ]
    assert seconds(bench, train).marks == [pytest.approx(1.0), pytest.approx(5.0)]


def test_threads_that_wait_for_each_other_are_an_error(bench):
    with pytest.raises(RuntimeError, match="does not end"):
        seconds(bench, [bench.schedule.Op("join", event=1)], [bench.schedule.Op("begin", event=1)])


def recorded(bench, case, **more):
    return bench.model.record(replace(bench.model.LLAMA_3B, blocks=4), case, **more)


def predicted(bench, case, **more):
    return bench.replay.replay(recorded(bench, case, **more), replace(bench.model.H200, flops=4e14))


def last_first(engine):
    """Update units in the reverse of the order in which the forward needs them."""
    start = engine.updater.start

    def reversed_start(update):
        engine.updater._uses = engine.updater._uses[::-1]
        start(update)

    engine.updater.start = reversed_start


def test_the_prediction_follows_the_order_of_the_engine(bench):
    case = bench.model.CASES["cpu fp32"]
    usual, reverse = predicted(bench, case), predicted(bench, case, prepare=last_first)
    assert reverse.busy("CPU") == pytest.approx(usual.busy("CPU"))
    assert reverse.step > 1.02 * usual.step, "no forward is hidden any more"


@pytest.mark.parametrize(
    "name, passes",
    [("cpu fp32", 28), ("cpu bf16 moments", 20), ("cpu int8 moments", 16 + 4 * 4 / 256)],
)
def test_bytes_of_the_real_shape(bench, name, passes):
    """Gradients out and parameters in once, in 16 bits; the update passes over its state twice,
    the gradient and the copy once.
    """
    schedule = recorded(bench, bench.model.CASES[name])
    elements = sum(replace(bench.model.LLAMA_3B, blocks=4).sizes().values())
    moved = {
        what: sum(op.size for op in schedule.of("launch") if op.what == what)
        for what in ("d2h", "h2d")
    }
    steps = bench.model.RECORDED
    assert moved == {
        "d2h": pytest.approx(2 * elements * steps),
        "h2d": pytest.approx(2 * elements * steps),
    }
    assert sum(op.size for op in schedule.of("host")) == pytest.approx(
        passes * elements * steps, rel=1e-3
    )


def test_files_carry_the_state_in_and_out_and_sharded_parameters_come_twice(bench):
    schedule = recorded(bench, bench.model.CASES["all in files"])
    elements, steps = (
        sum(replace(bench.model.LLAMA_3B, blocks=4).sizes().values()),
        bench.model.RECORDED,
    )
    by_kind = {
        what: sum(op.size for op in schedule.of("disk") if op.what == what)
        for what in ("read", "write")
    }
    assert by_kind["write"] == pytest.approx((12 + 2) * elements * steps, rel=1e-3)
    # The last block is still here when its backward begins, and so is the root.
    assert 12 + 2 < by_kind["read"] / (elements * steps) <= 12 + 4
