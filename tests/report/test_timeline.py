"""Timelines of traces that are written by hand: what is in flight, exposed, and cut off."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.errors import ConfigError
from hf_zero.measures.trace import PIDS
from hf_zero.report.timeline import read_timeline

HOST, KERNEL, COPY = "user_annotation", "kernel", "gpu_memcpy"


def event(begin: int, end: int, name: str, cat: str = HOST, rank: int = 0) -> dict[str, Any]:
    name = f"hf_zero::{name}" if cat == HOST else name
    return {"ph": "X", "cat": cat, "name": name, "pid": rank * PIDS, "tid": 1, "ts": begin,
            "dur": end - begin, "args": {}}  # fmt: skip


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as opened:
        lines = ",\n".join(map(json.dumps, events))
        opened.write('{"traceEvents": [\n' + lines + "\n]}\n")
    return path


STEP = [
    event(0, 10, "forward blocks.0"),  # of the step before
    event(15, 16, "end_step 4"),
    event(20, 22, "all_gather blocks.0"),
    event(22, 24, "all_gather blocks.1"),
    event(24, 200, "forward (root)"),
    event(25, 35, "wait_all_gather blocks.0"),
    event(24, 80, "forward blocks.0"),
    event(80, 81, "wait_all_gather blocks.1"),
    event(81, 190, "forward blocks.1"),
    event(200, 300, "backward blocks.1"),
    event(300, 302, "reduce_scatter blocks.1|trainable|float32"),
    event(302, 400, "backward blocks.0"),
    event(410, 430, "wait_reduction blocks.1|trainable|float32"),
    event(430, 432, "all_reduce norm"),
    event(440, 500, "update parameters on the device"),
    event(505, 506, "end_step 5"),
]


def test_the_spans_of_a_host(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path / "t.json.gz", [*STEP, event(0, 9, "x", "cpu_op")]))
    assert (found.step, found.length, found.ranks) == (5, 505 - 15, 1)
    at = {(bar.kind, bar.name): (bar.begin + 15, bar.end + 15) for bar in found.bars}
    assert at["gathers", "blocks.0"] == (20, 35) and at["gathers", "blocks.1"] == (22, 81)
    assert at["reductions", "blocks.1|trainable|float32"] == (300, 430)
    assert at["reductions", "norm"] == (430, 432)
    assert at["exposed", "wait for blocks.0"] == (25, 35)
    assert not [bar for bar in found.bars if bar.name == "(root)"]
    (row,) = found.rows()
    assert row["gathers"] * 1e3 == pytest.approx(81 - 20)
    assert row["gathers exposed"] * 1e3 == pytest.approx(10 + 1)
    assert row["reductions exposed"] * 1e3 == pytest.approx(20)
    assert row["compute"] * 1e3 == pytest.approx((80 - 24 - 10) + (190 - 81) + 100 + 98)
    assert row["updates"] * 1e3 == pytest.approx(60) and not row["transfers"]


def test_a_message_of_several_units_is_in_flight_until_the_first_of_them_is_awaited(
    tmp_path: Path,
) -> None:
    first, last = (f"blocks.{at}|trainable|float32" for at in (1, 0))
    packed = [
        event(303, 305, f"reduce_scatter {first}..{last}"),
        event(401, 404, f"wait_reduction {first}"),
        event(405, 406, f"wait_reduction {last}"),
    ]
    steps = [each for each in STEP if "reduc" not in each["name"]]
    found = read_timeline(write(tmp_path / "t.json.gz", [*steps, *packed]))
    (bar,) = [bar for bar in found.bars if bar.kind == "reductions" and bar.name != "norm"]
    assert (bar.name, bar.begin + 15, bar.end + 15) == (f"{first}..{last}", 303, 404)


def test_the_kernels_of_a_device(tmp_path: Path) -> None:
    """Communication is exposed where no other kernel runs; copies on the device are none."""
    device = [
        event(100, 200, "gemm", KERNEL),
        event(210, 300, "gemm", KERNEL),  # a short pause
        event(150, 330, "ncclDevKernel_AllGather_RING", KERNEL),
        event(290, 320, "ncclDevKernel_ReduceScatter", KERNEL),
        event(340, 350, "Memcpy DtoH (Device -> Pinned)", COPY),
        event(350, 360, "Memcpy DtoD", COPY),
    ]
    found = read_timeline(write(tmp_path / "t.json.gz", [*STEP, *device]))
    (row,) = found.rows()
    assert row["compute"] * 1e3 == pytest.approx(200)
    assert row["gathers"] * 1e3 == pytest.approx(180)
    assert row["gathers exposed"] * 1e3 == pytest.approx(30)
    assert row["reductions exposed"] * 1e3 == pytest.approx(20)
    assert row["transfers"] * 1e3 == pytest.approx(10) and row["updates"] * 1e3 == pytest.approx(60)


def test_a_trace_without_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no steps of an engine; make it with engine\.trace"):
        read_timeline(write(tmp_path / "t.json.gz", STEP[:1]))


def test_some_of_many_ranks(tmp_path: Path) -> None:
    ranks = [each | {"pid": rank * PIDS} for rank in range(7) for each in STEP]
    found = read_timeline(write(tmp_path / "t.json.gz", ranks))
    assert (found.ranks, found.shown) == (7, 4) and {bar.rank for bar in found.bars} == {0, 1, 2, 3}
