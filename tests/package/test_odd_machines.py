"""`hf-zero smoke`, which trains, saves, resumes and compares, on a machine that lacks something."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import completed

# What a shell does before it starts the command.
SHELL = [
    "mkdir 'a b' && cd 'a b'",
    "mount -t tmpfs -o size=16m tmpfs /dev/shm",
    "ip link set lo up",  # the only network
    "hostname nowhere.invalid",  # does not resolve
    "ulimit -n 256",
    "unset HOME",
    "export LC_ALL=C PYTHONIOENCODING=ascii PYTHONOPTIMIZE=1",
]
NAMESPACES = ["unshare", "--mount", "--net", "--uts"]
SMOKE = [sys.executable, "-c", "from hf_zero.cli import main; main()", "smoke", "--ranks", "2"]


def smoke(folder: Path, *before: str) -> None:
    done = completed([*before, *SMOKE], timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_machine_that_lacks_everything(tmp_path: Path) -> None:
    if completed([*NAMESPACES, "true"]).returncode:
        pytest.skip("namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("no ip on this machine (Debian: apt-get install iproute2)")
    smoke(tmp_path, *NAMESPACES, "sh", "-c", f'{" && ".join(SHELL)} && exec "$@"', "sh")
