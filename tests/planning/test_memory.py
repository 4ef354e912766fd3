"""Free memory as the kernel tells it."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch

from hf_zero.device import host_limits
from hf_zero.device.free_memory import DiskFree, FreeBytes, free_bytes, measure
from tests.helpers.commands import completed

GIB = 1 << 30
CPU = torch.device("cpu")


def write(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def left(root: Path) -> dict[str, int]:
    return {
        bound.why.removeprefix(f"left by the control group {root}/sys/fs/cgroup"): bound.nbytes
        for bound in host_limits.cgroups(root)
    }


def test_version_2_counts_every_group_from_the_innermost_to_the_root(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job/step",
            "sys/fs/cgroup/slice/memory.max": "max",
            "sys/fs/cgroup/slice/memory.current": 9 * GIB,
            "sys/fs/cgroup/slice/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/slice/job/memory.high": "max",
            "sys/fs/cgroup/slice/job/memory.current": 3 * GIB,
            "sys/fs/cgroup/slice/job/memory.stat": f"anon {GIB}\ninactive_file "
            f"{GIB}\nactive_file 5",
            "sys/fs/cgroup/slice/job/step/memory.max": "max",
            "sys/fs/cgroup/slice/job/step/memory.high": 7 * GIB,
            "sys/fs/cgroup/slice/job/step/memory.current": 2 * GIB,
        },
    )
    assert left(root) == {"/slice/job/step": 5 * GIB, "/slice/job": 6 * GIB}


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    """The path is that of the host, where nothing of it is mounted. Ranks share what it leaves."""
    assert left(tmp_path) == {}
    assert host_limits.free_ram(tmp_path).nbytes == pytest.approx(
        psutil.virtual_memory().available, rel=0.2
    )
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod7/c3",
            "sys/fs/cgroup/memory.max": 2 << 20,
            "sys/fs/cgroup/memory.current": 1 << 20,
        },
    )
    assert left(root) == {"": 1 << 20}
    why = f"left by the control group {root}/sys/fs/cgroup"
    for ranks in (1, 4):
        bound = host_limits.free_ram(root, ranks)
        assert (bound.nbytes, bound.why) == ((1 << 20) // ranks, why)


def test_ulimits_bound_each_process_by_itself() -> None:
    """In a process of its own, which has room for 2 GiB beyond what it has taken."""
    code = (
        "import psutil, resource\n"
        "from hf_zero.device import host_limits as host\n"
        "for name, limit, kind in (('ulimit -d', 'DATA', 'data'), ('ulimit -v', 'AS', 'vms')):\n"
        "    used = getattr(psutil.Process().memory_info(), kind)\n"
        "    limit = getattr(resource, f'RLIMIT_{limit}')\n"
        "    resource.setrlimit(limit, (used + (2 << 30), resource.RLIM_INFINITY))\n"
        "    (one,) = [bound for bound in host.bounds() if bound.why.startswith(name)]\n"
        "    print(one.nbytes, one.shared, host.free_ram(ranks=1).nbytes <= one.nbytes)"
    )
    done = completed([sys.executable, "-c", code], timeout=300, check=True)
    for line in done.stdout.splitlines():
        nbytes, shared, bounds = line.split()
        assert (2 << 30) * 0.9 < int(nbytes) <= 2 << 30 and (shared, bounds) == ("False", "True")
    assert len(done.stdout.splitlines()) == 2


def test_locked_memory_is_bounded_without_the_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    lock = 1 << host_limits.CAP_IPC_LOCK
    for number, (capabilities, limit) in enumerate(((lock, None), (~lock & 0xFFFF, 65536))):
        status = f"Name:\tx\nCapEff:\t{capabilities:016x}"
        root = write(tmp_path / str(number), {"proc/self/status": status})
        assert host_limits.memlock(root) == limit
    for user, limit in ((0, None), (1000, 65536)):  # without /proc
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert host_limits.memlock(tmp_path) == limit
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: infinite)
    assert host_limits.memlock(root) is None


def test_ranks_share_the_cpu_and_their_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is one tier with the memory; folders need not be there."""
    whole = free_bytes(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (tmp_path / "taken").write_text("")
    folders = [str(tmp_path / "a"), str(tmp_path / "b" / "c"), str(tmp_path / "a")]
    shared = measure(CPU, folders)
    assert shared.host_device and shared.device == shared.ram
    assert shared.ram == pytest.approx(whole / 4, rel=0.2) and shared.ram == pytest.approx(
        free_bytes(CPU), rel=0.2
    )
    assert shared.limited_by.endswith("shared by 4 ranks")
    assert measure(CPU, ranks=1).ram == pytest.approx(whole, rel=0.2)
    assert [(disk.path, disk.disk) for disk in shared.disks] == [(each, 0) for each in folders[:2]]
    free = shutil.disk_usage(tmp_path).free
    assert shared.disks[0].nbytes == pytest.approx(free / 4, rel=0.1)


def test_ranks_agree_on_the_least_of_each_number() -> None:
    one = FreeBytes(10, 20, (DiskFree("/a", 5, 0), DiskFree("/b", 9, 1)), limited_by="x")
    other = FreeBytes(12, 15, (DiskFree("/a", 7, 0), DiskFree("/b", 7, 0)), limited_by="y")
    least = [min(pair) for pair in zip(one.numbers(), other.numbers(), strict=True)]
    agreed = one.with_numbers(least)
    assert agreed == FreeBytes(10, 15, (DiskFree("/a", 5, 0), DiskFree("/b", 7, 0)), limited_by="x")
    assert agreed.numbers() == other.with_numbers(least).numbers()
    assert FreeBytes(1, 2).with_numbers([3, 4]) == FreeBytes(3, 4)
    assert FreeBytes(1, 2).plus(device=10, ram=5) == FreeBytes(11, 7)
    assert FreeBytes(1, 2, host_device=True).plus(device=10) == FreeBytes(11, 12, host_device=True)
