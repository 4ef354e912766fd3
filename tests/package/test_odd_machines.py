"""`hf-zero smoke`, which trains, saves, resumes and compares, on machines that lack something."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import completed

# What a shell does before it starts the command, and the namespaces that this needs.
SHELLS = {
    "a path with a space": ([], "mkdir 'a b' && cd 'a b'"),
    "16 MB of /dev/shm": (["--mount"], "mount -t tmpfs -o size=16m tmpfs /dev/shm"),
    "no network but loopback": (["--net"], "ip link set lo up"),
    "a host name that does not resolve": (["--uts"], "hostname nowhere.invalid"),
    "256 descriptors": ([], "ulimit -n 256"),
    "no HOME": ([], "unset HOME"),
    "LC_ALL=C": ([], "export LC_ALL=C PYTHONIOENCODING=ascii"),
    "python -O": ([], "export PYTHONOPTIMIZE=1"),
}
USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def smoke(names: list[str], folder: Path, user: list[str]) -> None:
    namespaces = [option for name in names for option in SHELLS[name][0]]
    lines = " && ".join(SHELLS[name][1] for name in names)
    run = [*user, sys.executable, "-c", "from hf_zero.cli import main; main()", "smoke"]
    shell = ["sh", "-c", f'{lines} && exec "$@"' if lines else 'exec "$@"', "sh", *run]
    command = ["unshare", *namespaces, *shell] if namespaces else shell
    if namespaces and completed(["unshare", *namespaces, "true"]).returncode:
        pytest.skip("namespaces need root")
    if "--net" in namespaces and shutil.which("ip") is None:
        pytest.skip("no ip on this machine (Debian: apt-get install iproute2)")
    done = completed([*command, "--ranks", "2"], timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", SHELLS)
def test_a_machine_that_lacks_something(name: str, tmp_path: Path) -> None:
    smoke([name], tmp_path, [])


@pytest.mark.long
def test_a_machine_that_lacks_everything(tmp_path: Path) -> None:
    smoke([*SHELLS], tmp_path, [])


@pytest.mark.long
def test_a_user_who_is_not_root(tmp_path: Path) -> None:
    if os.getuid():
        return  # as every other test
    if completed([*USER, sys.executable, "-c", ""]).returncode:
        pytest.skip("another user cannot read this interpreter")
    tmp_path.chmod(0o777)
    smoke([], tmp_path, USER)
