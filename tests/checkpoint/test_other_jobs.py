"""Saves into a folder in which another running job of this host has saved."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hf_zero import checkpoint
from hf_zero.checkpoint import find
from hf_zero.checkpoint.host_folders import job_identity
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.save_log import SaveLog
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import trained
from tests.helpers.commands import end_group

# another job's file, locked as its engine does
OTHER = """
import fcntl, json, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
head = {"job": "other", "host": "here", "pid": os.getpid()}
print(json.dumps(head), *map(json.dumps, json.loads(sys.argv[2])), sep="\\n", file=file, flush=True)
print("saved", flush=True)
sys.stdin.readline()  # then the engine is destroyed
file.close()
print("closed", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test alone, in place of the one of this host."""
    monkeypatch.setattr("hf_zero.checkpoint.save_log._folder", lambda: tmp_path / "saves")
    return tmp_path / "saves"


@contextlib.contextmanager
def other_job(folder: Path, *saves: tuple[str, Path]) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    given = json.dumps([(save_id, str(final.resolve())) for save_id, final in saves])
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, folder / "other", given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "saved\n"
        yield process
    finally:
        end_group(process)


def save_id(folder: Path) -> str:
    return read_manifest(folder / MANIFEST_NAME).save_id


def test_a_checkpoint_of_another_running_job_is_not_replaced(
    tmp_path: Path, own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is one that it is about to write, nor is one removed to keep a number of them. Its own
    checkpoints, and those of jobs that have ended or destroyed their engine, are.
    """
    engine, runs = trained(1), tmp_path / "runs"
    for tag in ("global_step1", "global_step2", "global_step3"):
        checkpoint.save(engine, runs, tag=tag)
    theirs, begun = save_id(runs / "global_step1"), "0" * 32
    (runs / f"{find.SAVING}new.{begun[:8]}").mkdir()
    before = sorted(runs.rglob("*"))
    with other_job(own_folder, (theirs, runs / "global_step1"), (begun, runs / "new")) as process:
        assert process.stdin is not None and process.stdout is not None
        for tag in ("global_step1", "new"):
            with pytest.raises(CheckpointError) as raised:
                checkpoint.save(engine, runs, tag=tag)
            for part in (str(runs / tag), f"pid {process.pid} on ", "pass another folder or tag"):
                assert part in str(raised.value)
        assert sorted(runs.rglob("*")) == before and save_id(runs / "global_step1") == theirs
        shutil.copytree(runs, tmp_path / "copy")
        checkpoint.save(engine, tmp_path / "copy", tag="global_step1")
        checkpoint.save(engine, runs, tag="global_step2")  # of this process
        checkpoint.save(engine, runs, tag="global_step4", keep=1)
        assert find.tags_in(runs) == ["global_step1", "global_step4"]
        assert "global_step1 was written by the job" in caplog.text
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        checkpoint.save(engine, runs, tag="global_step1")
    engine.destroy()
    assert not list(own_folder.iterdir())


def test_a_host_without_a_place_for_the_file(
    tmp_path: Path, own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_folder.symlink_to(tmp_path)  # as another user could make it
    log = SaveLog()
    for each in ("a", "b"):
        log.note((each, "/a"))
    assert not log.others() and caplog.text.count("cannot notice saves of this one") == 1
    log.close()


OWN = job_identity(None)[0]
SAVES = '\n["a", "/a"]\n["b", "/b"]\n'
FILES = {
    "": [],  # its process is about to write it
    "{": [],
    "[]\n[]\n": [],
    json.dumps({"job": "other", "host": "h", "pid": -1}) + SAVES: [("a", "/a"), ("b", "/b")],
    json.dumps({"job": OWN, "host": "h", "pid": -1}) + SAVES: [],
    json.dumps({"job": "other", "host": "h", "pid": os.getpid()}) + SAVES: [],
    json.dumps({"job": "driver", "host": "h", "pid": os.getppid()}) + SAVES: [],
}


def test_files_of_this_job_and_of_the_processes_that_started_it_do_not_count(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any where the system hides processes of other users."""

    def hidden(_: psutil.Process) -> list[psutil.Process]:
        raise psutil.AccessDenied

    log, other = SaveLog(), SaveLog()
    log.note(("a", "/a"))
    (path,) = own_folder.iterdir()
    for text, ids in FILES.items():
        path.write_text(text)
        assert list(other.others()) == ids, text
    path.write_text(json.dumps({"job": "other", "host": "h", "pid": -1}) + SAVES)
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "parents", hidden)
        assert not other.others()
    assert other.others()
    log.close()
    assert not other.others()
