"""Whichever call a library or a script begins with, the process group serves the device by NCCL
and host memory by gloo, and jobs train as where hf_zero begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.helpers.cells import fast
from tests.late import launch

ROUTES = ("accelerate", "trainer", "deepspeed", "lightning", "script", "script_by_device")


@cache
def begun(route: str) -> Sequence[dict[str, Any]]:
    launch.needs_the_device()
    return launch.run_ranks("tests.late.routes", "eager", route)


@pytest.mark.parametrize("route", fast(ROUTES, "accelerate".__eq__))
def test_a_group_serves_host_memory_whoever_begins(route: str) -> None:
    here, plain = begun(route), begun("nothing")
    for row in (*here, *plain):
        assert row["backends"] == "cpu:gloo,cuda:nccl" and not row["reports"], row
        assert row["worst"] < 1e-5 and row["worst of a pipeline"] < 1e-5, row
        assert row["gathered on the host"] == 2 and row["objects"] == [0, 1], row
    for row, other in zip(here, plain, strict=True):
        assert row["rank"] == other["rank"] and row["waits"] == other["waits"], (row, other)
