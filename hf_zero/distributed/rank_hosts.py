"""The host of each rank: published through the store while all ranks are well, for error messages
when one is lost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from hf_zero.distributed.network_interface import own_address

NAMES = ("HF_ZERO_HOST", "SLURMD_NODENAME")  # names that the user knows: of the hostfile, of SLURM
KEY = "hf_zero/launch"

_hosts: list[str] = []


def learn(store: Any, rank: int, world: int) -> None:
    """Publish this rank's host and read those of all ranks (collective over the store, once per
    process).

    Rank 0 collects, so that n ranks read n keys.
    """
    if len(_hosts) == world:
        return
    store.set(f"{KEY}/{rank}", own_host())
    if rank == 0:
        store.set(KEY, "\n".join(store.get(f"{KEY}/{each}").decode() for each in range(world)))
    _hosts[:] = store.get(KEY).decode().split("\n")


def own_host() -> str:
    """Return this host's name and address: ``worker-1 (10.0.0.2)``."""
    name = next((os.environ[each] for each in NAMES if os.environ.get(each)), socket.gethostname())
    address = own_address(os.environ.get("MASTER_ADDR"))
    return f"{name} ({address})" if address and address != name else name


def numbers(ranks: Sequence[int]) -> str:
    """Return ``0-3`` for ranks 0 to 3, ``0, 2`` for ranks 0 and 2; a range has at least three."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [[f"{each[0]}-{each[-1]}"] if len(each) > 2 else map(str, each) for each in ranges]
    return ", ".join(text for part in parts for text in part)


def of(ranks: Iterable[int]) -> str:
    """Return ``rank 1 on worker-0 (10.0.0.1), ranks 2, 3 on worker-1 (10.0.0.2)``; only the numbers
    if :func:`learn` was never called.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(_hosts[rank] if rank < len(_hosts) else "", []).append(rank)
    parts = [
        f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}"
        + (f" on {host}" if host else "")
        for host, group in by_host.items()
    ]
    return ", ".join(parts)
