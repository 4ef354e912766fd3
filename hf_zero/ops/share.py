"""The number of threads of this rank's kernels: its share of the cores, whatever OMP_NUM_THREADS
is.

Launchers set OMP_NUM_THREADS=1 so that ranks do not compete for cores, which leaves cores idle
while one rank updates its shard. A rank may use the cores it is bound to; if the ranks of a machine
share its cores, an equal part of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_zero.errors import ConfigError

VARIABLE = "HF_ZERO_THREADS"


@dataclass(frozen=True)
class Share:
    """A number of threads and its source, in words."""

    threads: int
    source: str


def share_of_this_rank(environ: Mapping[str, str] = os.environ) -> Share:
    """Return the threads for this rank.

    ``HF_ZERO_THREADS`` if it is set. Else the cores of the affinity mask, divided by
    ``LOCAL_WORLD_SIZE`` unless the launcher has bound this rank to a part of its own; at most the
    cgroup's cpu quota, divided by ``LOCAL_WORLD_SIZE``; at least 1.

    Raises:
        ConfigError: one of the two variables is no number of at least 1.
    """
    if environ.get(VARIABLE):
        return Share(_at_least_one(environ, VARIABLE), VARIABLE)
    ranks = _at_least_one(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else 1
    mine = _affinity(0)
    cores, bound = len(mine), mine < _affinity(os.getppid())
    among = f" among {ranks} local ranks" if ranks > 1 else ""
    share = cores if bound else max(1, cores // ranks)
    source = f"{cores} cores this rank is bound to" if bound else f"{cores} cores{among}"
    quota = cpu_quota()
    if quota is not None and quota / ranks < share:
        share, source = (
            max(1, math.ceil(quota / ranks)),
            f"a cgroup quota of {quota:g} cores{among}",
        )
    return Share(share, source)


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the number of cores that the cgroups (v1 or v2) of this process allow, the least along
    the path; None without a limit.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None  # no cgroups on this system
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = (
                next(
                    (root / name for name in (controllers, "cpu") if (root / name).is_dir()),
                    root / "cpu",
                ),
                _quota_v1,
            )
        else:
            continue
        # In a container the path may be that of the host, and the mount is the container's own
        # group: its root counts too.
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            found.append(read(folder))
            if folder == base:
                break
    limits = [quota for quota in found if quota is not None]
    return min(limits) if limits else None


def _quota_v2(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return None if not quota or not period or int(quota[0]) <= 0 else int(quota[0]) / int(period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # the group has no such file (the root has none): no limit


def _affinity(pid: int) -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    try:
        return os.sched_getaffinity(pid)
    except OSError:  # the parent has ended or is another user's: compare with the machine
        return set(range(os.cpu_count() or 1))


def _at_least_one(environ: Mapping[str, str], name: str) -> int:
    value = environ[name]
    if not value.strip().isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}; write a number of at least 1, or unset it")
    return int(value)
