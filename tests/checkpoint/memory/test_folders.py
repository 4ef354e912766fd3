"""Identities of jobs, hosts that keep copies, room, and the command that removes what jobs have
left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_zero.checkpoint.memory import folders
from hf_zero.checkpoint.memory.hosts import Hosts
from hf_zero.cli.app import app

VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RANK")
# the key, values of VARIABLES, how the identity begins, and whether it lasts
JOBS = [
    ("run/7", ["5", None, None], "run-7", True),
    (None, ["5", "x", None], "slurm-5", True),
    (None, [None, "x y", None], "run-x-y", True),
    (None, [None, "none", "0"], f"launcher-{os.getppid()}-", True),
    (None, [None, None, None], f"process-{os.getpid()}-", False),
]


def test_a_job_is_known_by_what_its_restarts_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, values, job, lasting in JOBS:
        for name, value in zip(VARIABLES, values):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        found, lasts = folders.job_identity(asked)
        assert found.startswith(job) and lasts == lasting
        assert folders.job_identity(asked)[0] == found, "it is the same at each call"


PARTNERS = [
    ("ab", 2, [[1], [0]]),
    ("ab", 3, [[1], [0]]),
    ("aa", 2, [[], []]),
    ("aabb", 2, [[2], [3], [0], [1]]),
    ("abab", 2, [[1], [0], [3], [2]]),
    ("aaab", 2, [[3], [3], [3], [0]]),
    ("abc", 3, [[1, 2], [2, 0], [0, 1]]),
    ("abc", 1, [[], [], []]),
]


def test_copies_are_on_the_next_hosts() -> None:
    for hosts, copies, partners in PARTNERS:
        made, ranks = Hosts(hosts), range(len(hosts))
        assert [made.partners(rank, copies) for rank in ranks] == partners, hosts
        pairs = {(rank, peer) for rank, peers in enumerate(partners) for peer in peers}
        kept = {(rank, peer) for peer in ranks for rank in made.kept_by(peer, copies)}
        assert kept == pairs, hosts


def left(base: Path, job: str) -> Path:
    folder = folders.job_folder(base, job)
    slot = folder / "host" / "engine-0" / "slot-0"
    slot.mkdir(parents=True)
    (slot / "rank-00000-of-00001.safetensors").write_bytes(bytes(1000))
    return folder


def test_a_file_that_a_resume_links_to_makes_no_room(tmp_path, monkeypatch):
    folder = left(tmp_path, "job")
    monkeypatch.setattr(folders, "free", lambda base: 70)
    resume = folder / "resume"
    resume.mkdir()
    for path in folder.rglob("*.safetensors"):
        (resume / path.name).symlink_to(path)
    (resume / "fetched").write_bytes(bytes(200))
    assert folders.room(tmp_path, folder) == 1270


def test_clean_names_what_jobs_have_left_and_removes_what_none_uses(tmp_path: Path) -> None:
    old, live = left(tmp_path, "old"), left(tmp_path, "live")
    (tmp_path / "hf-zero-other").mkdir()
    mark = folders.InUse(live)

    def clean(folder: Path, *options: str) -> str:
        told = CliRunner().invoke(app, ["clean", "--folder", str(folder), *options])
        assert told.exit_code == 0, told.output
        return told.output

    def states(*options: str) -> dict[str, str]:
        rows = json.loads(clean(tmp_path, "--json", *options))
        assert all(row["bytes"] == 1000 for row in rows)
        return {Path(row["folder"]).name: row["state"] for row in rows}

    assert states() == {old.name: "left", live.name: "in use"}
    assert old.exists()
    assert states("--remove") == {old.name: "removed", live.name: "in use"}
    assert not old.exists() and live.exists() and (tmp_path / "hf-zero-other").exists()
    mark.close()
    assert states() == {live.name: "left"}
    assert "1 of them can go" in clean(tmp_path)
    (tmp_path / "empty").mkdir()
    assert clean(tmp_path / "empty") == f"no checkpoints in memory in {tmp_path / 'empty'}\n"
