"""Runs whose launcher starts their ranks again after one was killed: they go on from the newest
checkpoint, on disk or in the memory of the hosts, with the losses of a run that was not
interrupted, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import launched

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"
IN_MEMORY = pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])


def goes_on(reports, first):
    for report in reports:
        assert report["attempt"] == 1
        whole, run = report["whole"], report["run"]
        assert whole["first"] == 0 and run["first"] == first
        assert run["losses"] == whole["losses"][2 * first :] != []


def reports(command, out, route, in_memory):
    """Killed in step 8 of 10, in the second epoch; saved after step 6."""
    more = ["--memory", str(out / "memory")] if in_memory else []
    found = launched._reports(command, out, ("--route", route, *more), 2, 300.0)
    goes_on(found, 6)
    assert bool(list((out / "run").glob("**/manifest.json"))) is not in_memory
    assert not list((out / "memory").glob("*")), "its memory is free again"
    return found


@IN_MEMORY
def test_torchrun(in_memory, tmp_path):
    command = launched.torchrun_command(SCRIPT)
    command[3:3] = ["--max-restarts", "1"]
    found = reports(command, tmp_path, "loop", in_memory)
    if not in_memory:
        assert {report["run"]["seen"] for report in found} == {48}


@IN_MEMORY
def test_accelerate_launch(in_memory, tmp_path):
    memory = {"memory": {"every": 2, "folder": str(tmp_path / "memory")}}
    keys = {"checkpoint": memory} if in_memory else {}
    command = launched.accelerate_command(
        SCRIPT, tmp_path, 2, gradient_accumulation_steps=2, **keys
    )
    command[3:3] = ["--max_restarts", "1"]
    reports(command, tmp_path, "accelerate", in_memory)
