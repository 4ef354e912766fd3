"""torchrun restarts a script of DeepSpeed's kind whose ranks are killed; it goes on from memory, as
nothing is on disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_zero.checkpoint.memory import folders
from tests.helpers import launched

SCRIPT = Path(__file__).with_name("restarting.py")
EVERY = 2
KILLS = [  # of each attempt: the point, its count, the ranks
    [["copied", 2, [1]], ["fetched", 1, [0]], ["committing", 1, [0, 1]]],
    [["staging", 2, [0]], ["loaded", 1, [0, 1]], ["before", 1, [1]], ["recorded", 2, [0]]],
    [["before", 1, [0]], ["staged", 1, [1]], ["hashed", 2, [0, 1]], ["committed", 1, [1]]],
    [["committed", 2, [0, 1]], ["fetching", 1, [1]], ["fetched", 1, [0]], ["copied", 1, [0]]],
]


def rows(out: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of each rank."""
    files = sorted(out.glob("rows-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def run(out: Path, kills: list[Any]) -> list[list[dict[str, Any]]]:
    name = f"restarted-{os.getpid()}-{out.name}"
    *command, script = launched.torchrun_command(SCRIPT)
    more = ["--rdzv-id", name, "--max-restarts", str(len(kills)), "--monitor-interval", "0.1"]
    with launched.started(
        [*command, *more, script], out, ["--kills", json.dumps(kills)]
    ) as process:
        code = launched.ended(process, 300)
        assert code == 0, (out / "log.txt").read_text()[-6000:]
    for base in folders.bases(None):
        assert not folders.job_folder(base, f"run-{name}").exists()
    found = rows(out)
    assert not any(psutil.pid_exists(row["pid"]) for of in found for row in of if "pid" in row)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kills", KILLS)
def test_torchrun_restarts_a_killed_job(kills: list[Any], tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", [])
    wanted = [{row["step"]: row["losses"] for row in of if "step" in row} for of in whole]
    for losses, found in zip(wanted, run(tmp_path / "killed", kills)):
        starts = [row for row in found if "pid" in row]
        assert starts[-1]["attempt"] == len(kills)
        assert starts[-1]["from"] > 0 and starts[-1]["path"].startswith(str(folders.bases(None)[0]))
        last = 0
        for row in found:
            if "pid" in row:
                # copies that are under way at the end of a step are those of the save before
                assert row["from"] > last - 2 * EVERY
            else:
                assert row["losses"] == losses[row["step"]]
                last = row["step"] + 1
