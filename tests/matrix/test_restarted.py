"""Runs whose launcher starts their ranks again after one was killed: they go on from the newest
checkpoint with the losses of a run that was not interrupted, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers import launched

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"


def goes_on(reports, first):
    for report in reports:
        assert report["attempt"] == 1
        whole, run = report["whole"], report["run"]
        assert whole["first"] == 0 and run["first"] == first
        assert run["losses"] == whole["losses"][2 * first :] != []


def test_torchrun(tmp_path):
    """Killed in step 8 of 10, in the second epoch; saved after step 6."""
    command = launched.torchrun_command(SCRIPT)
    command[3:3] = ["--max-restarts", "1"]
    reports = launched._reports(command, tmp_path, ("--route", "loop"), 2, 300.0)
    goes_on(reports, 6)
    assert {report["run"]["seen"] for report in reports} == {48}


def test_accelerate_launch(tmp_path):
    command = launched.accelerate_command(SCRIPT, tmp_path, 2, gradient_accumulation_steps=2)
    command[3:3] = ["--max_restarts", "1"]
    goes_on(launched._reports(command, tmp_path, ("--route", "accelerate"), 2, 300.0), 6)
