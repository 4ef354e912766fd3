"""The engine on ranks of the device: no report, and the losses of a plain loop."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cells import fast
from tests.late import launch, training

# The fast suite: each kind of collective and copy once; what ways out do, too, is left to the long
# one.
FAST = (
    "stage 2, optimizer on the host, updated in the backward",
    "stage 3, Muon",
    "stage 3, in few bits, errors fed back",
    "stage 1, momenta in 1 bit after a step",
    "interleaved_1f1b",
    "stage 2, branches on two streams that share messages",
    "stage 3, branches on two streams in a unit",
    "stage 3, activations on the host, branches on two streams",
    "stage 3, all on the host, built again between steps",
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


@pytest.mark.parametrize(
    "mode",
    ["lazy", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("random", "aliased"))],
)
def test_checkpoints_of_state_in_bf16(mode: str) -> None:
    """Another run takes the sums into host memory; a save that fails unpins no memory that a copy
    fills; a default device of torch moves nothing of the host.
    """
    launch.needs_the_device()
    jobs = ("sums", "a copy fails", "a default device")
    rows = launch.run_ranks("tests.late.checkpoints", mode, *jobs)
    assert sorted(row["job"] for row in rows) == sorted(jobs * 2)
    assert [row for row in rows if row["wrong"] or row["reports"]] == []


ROUTES = ("accelerate", "trainer", "script_by_device")


@pytest.mark.parametrize("route", fast(ROUTES, "accelerate".__eq__))
def test_a_group_serves_host_memory_whoever_begins(route: str) -> None:
    """Whichever call a library or a script begins with."""
    launch.needs_the_device()
    for row in launch.run_ranks("tests.late.routes", "eager", route):
        assert row["backends"] == "cpu:gloo,cuda:nccl" and not row["reports"], row
        assert row["worst"] < 1e-5, row
        assert row["gathered on the host"] == 2 and row["objects"] == [0, 1], row


FP32, SAVED = 7e-6, 0.0625  # relative; where saved, absolute, of a number below 8


@pytest.mark.long
@pytest.mark.parametrize("name", ["host_memory", "engine", "offload", "activations", "lightning"])
def test_the_tests_for_gpus_pass(name: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    own = launch.environment(
        as_cuda=True,
        HF_ZERO_BACKEND="hf_zero",
        HF_HUB_OFFLINE="1",
        LATE_DEVICES="2" if name == "lightning" else "1",
        LATE_REPORTS=f"{tmp_path}/{{rank}}-{{process}}.json",
    )
    own.pop("TRITON_INTERPRET", None)
    path = f"tests/gpu/test_{name}_on_gpu.py"
    launch.pass_tests(own, path, "-k", "not compiled", seconds=900)
    told = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert told and not any(each["reports"] for each in told), told
