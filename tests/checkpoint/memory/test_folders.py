"""Identities of jobs, what they leave, hosts that keep copies, and the command that removes it."""

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


@pytest.mark.parametrize(
    ("asked", "variables", "job", "lasting"),
    [
        ("run/7", {"SLURM_JOB_ID": "5"}, "run-7", True),
        (None, {"SLURM_JOB_ID": "5", "TORCHELASTIC_RUN_ID": "x"}, "slurm-5", True),
        (None, {"TORCHELASTIC_RUN_ID": "x y"}, "run-x-y", True),
        (None, {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, "launcher-{parent}-", True),
        (None, {}, "process-{own}-", False),
    ],
)
def test_a_job_is_known_by_what_its_restarts_keep(
    asked: str | None,
    variables: dict[str, str],
    job: str,
    lasting: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, lasts = folders.job_identity(asked)
    assert found.startswith(job.format(own=os.getpid(), parent=os.getppid()))
    assert lasts == lasting
    assert folders.job_identity(asked)[0] == found, "it is the same at each call"


@pytest.mark.parametrize(
    ("hosts", "copies", "partners"),
    [
        ("ab", 2, [[1], [0]]),
        ("ab", 3, [[1], [0]]),
        ("aa", 2, [[], []]),
        ("aabb", 2, [[2], [3], [0], [1]]),
        ("abab", 2, [[1], [0], [3], [2]]),
        ("aaab", 2, [[3], [3], [3], [0]]),
        ("abc", 3, [[1, 2], [2, 0], [0, 1]]),
        ("abc", 1, [[], [], []]),
    ],
)
def test_copies_are_on_the_next_hosts(hosts: str, copies: int, partners: list[list[int]]) -> None:
    made = Hosts(hosts)
    assert [made.partners(rank, copies) for rank in range(len(hosts))] == partners
    kept = [made.kept_by(rank, copies) for rank in range(len(hosts))]
    pairs = {(rank, peer) for rank, peers in enumerate(partners) for peer in peers}
    assert {(rank, peer) for peer, ranks in enumerate(kept) for rank in ranks} == pairs


def test_a_file_that_a_resume_links_to_makes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = left(tmp_path, "job")
    monkeypatch.setattr(folders, "free", lambda base: 70)
    resume = folder / "resume"
    resume.mkdir()
    for path in folder.rglob("*.safetensors"):
        (resume / path.name).symlink_to(path)
    (resume / "fetched").write_bytes(bytes(200))
    assert folders.room(tmp_path, folder) == 1270


def left(base: Path, job: str) -> Path:
    folder = folders.job_folder(base, job)
    slot = folder / "host" / "engine-0" / "slot-0"
    slot.mkdir(parents=True)
    (slot / "rank-00000-of-00001.safetensors").write_bytes(bytes(1000))
    return folder


def test_clean_names_what_jobs_have_left_and_removes_what_none_uses(tmp_path: Path) -> None:
    old, live = left(tmp_path, "old"), left(tmp_path, "live")
    (tmp_path / "hf-zero-other").mkdir()
    mark = folders.InUse(live)

    def states(*options: str) -> dict[str, str]:
        told = CliRunner().invoke(app, ["clean", "--folder", str(tmp_path), "--json", *options])
        assert told.exit_code == 0, told.output
        rows = json.loads(told.output)
        assert all(row["bytes"] == 1000 for row in rows)
        return {Path(row["folder"]).name: row["state"] for row in rows}

    assert states() == {old.name: "left", live.name: "in use"}
    assert old.exists()
    assert states("--remove") == {old.name: "removed", live.name: "in use"}
    assert not old.exists() and live.exists() and (tmp_path / "hf-zero-other").exists()
    mark.close()
    assert states() == {live.name: "left"}
    shown = CliRunner().invoke(app, ["clean", "--folder", str(tmp_path)])
    assert "1 of them can go" in shown.output
    (empty := tmp_path / "empty").mkdir()
    shown = CliRunner().invoke(app, ["clean", "--folder", str(empty)])
    assert shown.output == f"no checkpoints in memory in {empty}\n"
