"""Files of the disk files and the ends of processes: killed, living side by side, leftovers."""

import fcntl
import os
import signal
import subprocess
import sys

import torch

from hf_zero.offload.nvme_files import PREFIX, NvmeFiles, remove_leftovers

LIVING = """
import os, signal, sys, torch
from hf_zero.offload import nvme_files
files = nvme_files.NvmeFiles([sys.argv[1]], 0, block_size=8192)
extent = files.allocate("r", 1 << 22)
values = torch.arange(1 << 20, dtype=torch.int32)
extent.write(0, values)
files.flush()
print("ready", flush=True)
sys.stdin.readline()
out = torch.zeros_like(values)
extent.read(0, out).wait()
print("same" if torch.equal(out, values) else "other", flush=True)
sys.stdin.readline()
nvme_files.open_direct = lambda path: os.kill(os.getpid(), signal.SIGKILL)
nvme_files.NvmeFiles([sys.argv[1]])
"""


def test_processes_side_by_side_and_one_that_is_killed(tmp_path, heard_in_full):
    """They leave each other alone. One that is killed leaves nothing but a file that it was about
    to make, which the next run removes.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        files = NvmeFiles([tmp_path], 0, block_size=8192)
        files.allocate("r", 1 << 22).write(0, torch.zeros(1 << 20))
        files.flush()
        files.close()
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "same\n"
    assert os.listdir(tmp_path) == []
    process.communicate("end\n", timeout=300)
    assert process.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    NvmeFiles([tmp_path]).close()
    assert os.listdir(tmp_path) == []
    assert heard_in_full == [f"removed {tmp_path / left}, which a run that was killed had left"]


def test_what_is_not_a_leftover_stays(tmp_path):
    leftover, locked = tmp_path / f"{PREFIX}a", tmp_path / f"{PREFIX}b"
    full, folder, link, foreign = (
        tmp_path / f"{PREFIX}c",
        tmp_path / f"{PREFIX}d",
        tmp_path / f"{PREFIX}e",
        tmp_path / "model.bin",
    )
    for path in (leftover, locked, full, foreign):
        path.touch()
    full.write_text("somebody's")
    folder.mkdir()
    link.symlink_to(foreign)
    holder = os.open(locked, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert remove_leftovers(str(tmp_path)) == [str(leftover)]
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (locked, full, folder, link, foreign)
    }
    os.close(holder)
    assert remove_leftovers(str(tmp_path)) == [str(locked)]


def test_a_file_that_another_rank_took_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    real, taken = fcntl.flock, []

    def late(descriptor, how):
        if not taken:
            taken.extend(os.listdir(tmp_path))
            assert remove_leftovers(str(tmp_path)) == [str(tmp_path / taken[0])]
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    files = NvmeFiles([tmp_path])
    assert len(taken) == 1
    extent = files.allocate("r", 8)
    extent.write(0, torch.ones(8, dtype=torch.uint8)).wait()
    assert os.fstat(files._files[0].descriptor).st_size == files.nbytes
    assert os.listdir(tmp_path) == []
    files.close()
