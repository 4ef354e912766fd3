"""The engine on ranks of the device: no report, and the losses of a plain loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.helpers.cells import fast
from tests.late import host_syncs, launch, training

# The fast suite: each kind of collective and copy once; what deep models (test_families.py), faults
# (test_faults.py) and ways out do, too, is left to the long one.
FAST = (
    "stage 2, optimizer on the host, updated in the backward",
    "stage 3, Muon",
    "stage 3, in few bits, errors fed back",
    "stage 1, momenta in 1 bit after a step",
    "interleaved_1f1b",
    "stage 2, branches on two streams that share messages",
    "stage 3, branches on two streams in a unit",
    "stage 3, activations on the host, branches on two streams",
    "stage 2, in 4 bits, branches on two streams",
    "stage 3, weights in 8 bits, branches on two streams",
    "stage 3, all on the host, built again between steps",
    "stage 3, an optimizer of the CPU, small parameters whole",
)
# Again where streams are handed out twice: what has collectives in several threads or on several
# communicators.
ALIASED = (
    "stage 3, blocks left out",
    "stage 2, optimizer on the host, updated in the backward",
    "stage 3, gathers of the backward in the node",
)
ALL = (
    *training.JOBS,
    *training.BY_MATRICES,
    *training.IN_FEW_BITS,
    *training.BETWEEN_STEPS,
    *training.IN_MEMORY,
    *training.SCHEDULES,
    *training.LEFT_OUT,
    *training.BRANCHES,
)


def bounds(job: str) -> tuple[float, float]:
    """Between which the worst difference from a plain loop's losses lies."""
    if job in training.IN_FEW_BITS or "in 8 bits" in job:  # what their collectives lose shows
        return 1e-7, 0.03
    if job in training.BY_MATRICES:  # in bf16, where another order of a sum shows
        return -1.0, 0.01
    return -1.0, 1e-5


def is_right(row: dict[str, Any]) -> bool:
    """Ranks that leave out blocks may order reductions otherwise than gathers, which are on two
    communicators for that: nothing else is reported.
    """
    low, high = bounds(row["job"])
    may = "interleaved" if row["job"] in training.LEFT_OUT else ""
    return low < row["worst"] < high and all(
        kind == may and "reduce_scatter" in text and "all_gather" in text
        for kind, text in row["reports"]
    )


@pytest.mark.parametrize(
    ("mode", "jobs", "ranks"),
    [
        ("random", FAST, 2),
        ("aliased", ALIASED, 2),
        ("random", ("stage 3, branches on two streams, a unit prefetched",), 1),
        # on one rank no message orders the streams
        ("random", tuple(training.LAUNCHED), 1),
        *(
            pytest.param(mode, ALL, 2, marks=pytest.mark.long)
            for mode in ("eager", "aliased", "lazy", "random:10", "random:30")
        ),
        *(
            pytest.param(mode, tuple(training.OVER_HOSTS), 4, marks=pytest.mark.long)
            for mode in ("random", "aliased")
        ),
    ],
)
def test_jobs_train_without_a_report(mode: str, jobs: Iterable[str], ranks: int) -> None:
    launch.needs_the_device()
    words = ("tests.late.training", mode, *jobs)
    rows = launch.run_ranks(*words, ranks=ranks, hosts=-(-ranks // 2))
    assert sorted(row["job"] for row in rows) == sorted([*jobs] * ranks)
    assert [row for row in rows if not is_right(row)] == []


WAYS_OUT = (
    "stage 2",
    "stage 3",
    "stage 2, optimizer on the host",
    "stage 3, all on the host",
    *training.IN_MEMORY,
    *training.CAPTURABLE,
)


@pytest.mark.parametrize(
    ("mode", "jobs"),
    [
        ("lazy", ("stage 3, all on the host", "stage 2, kept in memory")),
        *(pytest.param(mode, WAYS_OUT, marks=pytest.mark.long) for mode in ("random", "aliased")),
    ],
)
def test_ways_out(mode: str, jobs: tuple[str, ...]) -> None:
    """Weights are sent, torch's state dicts are taken, saved beside the training and put back, and
    generations in memory are whole: without a wait of the host where weights stay on the device.
    """
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.ways_out", mode, *jobs)
    assert sorted(row["job"] for row in rows) == sorted(jobs * 2)
    assert [row for row in rows if row["wrong"] or row["waits"] or row["reports"]] == []


SAVED = ("sums", "a copy fails", "a default device", "copied later")
ALL_SAVED = (*SAVED, "resumed", "copied later, elsewhere")


@pytest.mark.parametrize(
    ("mode", "jobs"),
    [
        ("lazy", SAVED),
        *(
            pytest.param(mode, ALL_SAVED, marks=pytest.mark.long)
            for mode in ("lazy", "random", "aliased")
        ),
    ],
)
def test_checkpoints_of_state_in_bf16(mode: str, jobs: tuple[str, ...]) -> None:
    """Another run takes the sums into host memory; a save that fails unpins no memory that a copy
    fills; a default device of torch moves nothing of the host.
    """
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.checkpoints", mode, *jobs)
    assert sorted(row["job"] for row in rows) == sorted(jobs * 2)
    assert [row for row in rows if row["wrong"] or row["reports"]] == []


COUNTED = (
    "pipeline",
    "stage 2, optimizer on the host",
    "stage 3, replicas",
    "stage 3, parts of matrices",
    "stage 3, experts",
)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, COUNTED), *(pytest.param(ranks, (), marks=pytest.mark.long) for ranks in (2, 4))],
)
def test_as_many_communicators_are_made_as_foreseen(ranks: int, cases: tuple[str, ...]) -> None:
    launch.needs_the_device()
    hosts = ranks // 2
    rows = launch.run_ranks("tests.late.communicator_counts", *cases, ranks=ranks, hosts=hosts)
    assert len(rows) == (len(cases) or 11) * ranks
    assert [row for row in rows if row["made"] != row["foreseen"] or row["reports"]] == []


GRADIENT = {"_foreach_copy_": 1}  # into the message
KERNELS: dict[str, dict[str, int]] = {
    # a cast of the master weights for each of two gathers; one kernel casts and scales the result
    "stage 3, bf16": {**GRADIENT, "copy_": 2, "add": 1},
    # one cast after the update, of which gathers send the result
    "stage 3, bf16, shards kept": {**GRADIENT, "copy_": 1, "add": 1},
    "stage 3, fp32": {**GRADIENT, "mul": 1},
    "stage 2, bf16": {**GRADIENT, "copy_": 1, "add": 1},
    "stage 2, fp32": {**GRADIENT, "mul": 1},
    # the sum of the window in fp32 is cast for the message
    "stage 1, bf16": {**GRADIENT, "copy_": 2, "add": 1},
    "stage 1, fp32": {**GRADIENT, "mul": 1},
}


@pytest.mark.parametrize("mode", ["random", pytest.param("lazy", marks=pytest.mark.long)])
def test_a_setting_of_one_rank_is_refused_on_all_at_one_step(mode: str) -> None:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.settings", mode)
    assert [row["reports"] for row in rows if "reports" in row] == [[], []]
    found = [row for row in rows if "stage" in row]
    # the message of step 3 is read two steps later, at stage 0 three: a later step receives it
    assert sorted((row["stage"], row["step"]) for row in found) == [(0, 6)] * 2 + [(3, 5)] * 2
    for row in found:
        assert "rank 0 has changed nothing; rank 1 has lr 0.05 in group 0" in row["raised"]


def test_no_unit_copies_more_in_a_step_than_it_needs() -> None:
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.copies")
    found = {row["case"]: row["kernels"] for row in rows if "kernels" in row}
    assert found == KERNELS
    assert len(rows) == 2 * (len(KERNELS) + 1)
    for row in rows:
        if row["case"] == "write":
            assert row["old values gathered"] and not row["reports"], row


ROUTES = ("accelerate", "trainer", "deepspeed", "lightning", "script", "script_by_device")


@pytest.mark.parametrize("route", fast(ROUTES, "accelerate".__eq__))
def test_a_group_serves_host_memory_whoever_begins(route: str) -> None:
    """Whichever call a library or a script begins with."""
    launch.needs_the_device()
    for row in launch.run_ranks("tests.late.routes", "eager", route):
        assert row["backends"] == "cpu:gloo,cuda:nccl" and not row["reports"], row
        assert row["timeout"] == 1830, row  # the engine's, and what is left for its own errors
        assert row["worst"] < 1e-5, row
        assert row["gathered on the host"] == 2 and row["objects"] == [0, 1], row


# of two micro-batches: the host learns in each of four layers how many rows go where, for experts
# without a capacity
SYNCS = {"experts": {"dispatch.py: _to_copy": 8}}
NOTED = {
    "to the device": ["_to_copy"],
    "into the device": ["copy_"],
    "not pinned": ["_to_copy"],
    "numbers": ["tensor of numbers"],
    "to the host": ["_to_copy"],
    "an event": ["synchronize"],
    "the whole device": ["synchronize"],
    "uploaded": [],
    "into pinned memory": [],
    "on the device": [],
}


@pytest.mark.parametrize("names", fast(host_syncs.CASES, "alone".__eq__))
def test_a_step_waits_for_the_device_as_often_as_the_table_says(names: str) -> None:
    """Blocking copies in either direction, waits for events and streams: none but the table's."""
    launch.needs_the_device()
    env = launch.environment(as_cuda=True)
    rows = launch.run_ranks("tests.late.host_syncs", names, env=env)
    assert {row["case"] for row in rows} == host_syncs.CASES[names].keys() | {"counter"}
    for row in rows:
        assert not row["reports"], row
        expected = NOTED if row["case"] == "counter" else SYNCS.get(row["case"], {})
        assert row["found"] == expected, row


def test_gathers_reductions_copies_and_updates_run_beside_the_computation() -> None:
    """In simulated time: counted by rates, not measured. Of each pair of cases the second has a
    fault, in which the measure sees all of the time exposed.
    """
    launch.needs_the_device()
    rows = launch.run_ranks("tests.late.overlap")
    found = {row["case"]: row for row in rows if row["rank"] == 1}
    brought = "copy from host, not waited for"
    for what, right, wrong, least in (
        ("all_gather", "gathers, prefetched", "gathers, not prefetched", 10),
        ("reduce_scatter", "gathers, prefetched", "reductions, each awaited at once", 7),
        (brought, "activations, prefetched", "activations, not prefetched", 40),
    ):
        assert found[right][f"{what}, tasks"] == found[wrong][f"{what}, tasks"] >= least
        assert found[right][what] < 0.01 and found[wrong][what] > 0.9
    # of the parameters that a step has updated: that of the first block alone
    updated = found["gathers of updated parameters"]
    assert updated["all_gather, tasks"] == 7 and updated["all_gather"] < 0.2
    waited = found["updates that a step waits for"]
    assert waited["seconds"] > 0 and waited["beside forward"] == waited["beside backward"] == 0, (
        "the measure sees none"
    )
    for when, phase in (("next forward", "forward"), ("backward", "backward")):
        row = found[f"updates beside the {when}"]
        assert row[f"beside {phase}"] > 0.5 * row["seconds"], row
