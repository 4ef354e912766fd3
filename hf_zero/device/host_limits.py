"""Free host memory for this process: the machine's, within its control groups and ulimits."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CAP_IPC_LOCK = 14  # the bit of the capability in /proc/self/status
ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """One limit: the bytes left below it, its origin, and whether ranks of this host share it."""

    nbytes: int
    why: str
    shared: bool


class _Version(NamedTuple):
    """The places and file names of the numbers of one version of control groups."""

    controller: str  # as in /proc/self/cgroup; "" is version 2
    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    reclaimable: str  # file pages that the kernel drops before it kills a process


_VERSIONS = (
    _Version(
        "",
        ("sys/fs/cgroup", "sys/fs/cgroup/unified"),
        ("memory.max", "memory.high"),
        "memory.current",
        "inactive_file",
    ),
    _Version(
        "memory",
        ("sys/fs/cgroup/memory",),
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def bounds(root: Path = ROOT) -> Iterator[MemoryLimit]:
    """Yield every limit on the host memory that this process may still take.

    ``root`` is the parent of /proc and /sys.
    """
    import psutil

    yield MemoryLimit(psutil.virtual_memory().available, "available on this machine", True)
    yield from cgroups(root)
    for limit, kind, name in (
        (resource.RLIMIT_AS, "vms", "ulimit -v (address space)"),
        (resource.RLIMIT_DATA, "data", "ulimit -d (data)"),
    ):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            used = getattr(psutil.Process().memory_info(), kind, 0)
            yield MemoryLimit(max(0, soft - used), name, False)


def cgroups(root: Path = ROOT) -> Iterator[MemoryLimit]:
    """Yield the bytes left by each control group of this process, from the innermost to the root,
    in both versions.

    In a container the path in /proc may be outside the mounted tree, whose root is then the
    container's group: of the path and its parents those that exist in the tree count.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no /proc: not Linux
        return
    paths = {
        controller: path
        for _, names, path in (line.split(":", 2) for line in lines)
        for controller in names.split(",")
    }
    for version in _VERSIONS:
        for mount in (root / mount_path for mount_path in version.mounts):
            if version.controller not in paths:
                continue
            inner = Path(paths[version.controller].lstrip("/"))
            for folder in (mount / group for group in (inner, *inner.parents)):
                remaining = _left(folder, version)
                if remaining is not None:
                    yield MemoryLimit(remaining, f"left by the control group {folder}", True)


def free_ram(root: Path = ROOT, ranks: int = 1) -> MemoryLimit:
    """Return the tightest of :func:`bounds` for one of ``ranks`` processes on this host, which
    divide shared limits equally.
    """
    return min(
        (
            MemoryLimit(limit.nbytes // (ranks if limit.shared else 1), limit.why, limit.shared)
            for limit in bounds(root)
        ),
        key=lambda b: b.nbytes,
    )


def release_freed() -> None:
    """Have the C library return freed memory to the system: it keeps pieces below 32 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # exists in glibc only
    if trim is not None:
        trim(0)


def memlock(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may lock with ``mlock`` (``ulimit -l``); None if
    unlimited.

    The capability CAP_IPC_LOCK lifts the limit. It does not apply to memory pinned by
    ``cudaHostRegister``: NVIDIA's driver locks pages itself, and does not count them. It does apply
    to buffers registered with io_uring.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY or _capable(root):
        return None
    return soft


def _capable(root: Path) -> bool:
    try:
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    except OSError:
        pass
    return os.geteuid() == 0


def _left(folder: Path, version: _Version) -> int | None:
    """Return the bytes below the limit of one control group; None if it sets none.

    Cached files count as free: the kernel reclaims them.
    """
    try:
        limit = min(_number(folder / name) for name in version.limits if (folder / name).exists())
        used = _number(folder / version.usage)
    except (OSError, ValueError):  # no such group, or no limit in it
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= min(used, int(stat.get(version.reclaimable, 0)))
    except (OSError, ValueError):
        pass
    return max(0, int(limit - used)) if math.isfinite(limit) else None


def _number(path: Path) -> float:
    text = path.read_text().strip()
    return math.inf if text == "max" else int(text)
