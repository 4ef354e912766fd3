"""The meeting of the ranks of one attempt of a job, in a store that may hold what earlier attempts
left: torchrun's agent keeps one store for all attempts, so each attempt gets its own prefix. Under
other launchers, rank 0 hosts the store.

No variable of torchrun tells attempts apart on all hosts: each agent counts its own restarts.

torch's own rendezvous limits each connection and each wait separately, and names no rank: a rank
without a store to connect to tries again for several times the timeout.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_zero.distributed import uncaught
from hf_zero.errors import LaunchError

PREFIX = "hf_zero/attempts"
FIRST_PAUSE, LAST_PAUSE = 0.005, 0.5  # seconds between looks whether the others have come


def wait_for_store(address: str, port: int, seconds: float) -> None:
    """Return once a program accepts connections at ``address`` and ``port``.

    Raises LaunchError if none does within ``seconds``.
    """
    end = time.monotonic() + seconds
    for over in _looks(seconds):
        try:
            limit = max(LAST_PAUSE, end - time.monotonic())
            socket.create_connection((address, port), timeout=limit).close()
            return
        except OSError as error:
            if over:
                raise LaunchError(
                    f"nothing has answered for {seconds:.0f} s, which is the timeout "
                    f"({error.strerror or error}). Look at the output of rank 0, which hosts the "
                    "ranks' store unless torchrun does, and whether a firewall is between the hosts"
                ) from error


def store_of_attempt(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """Return ``store`` under a prefix that only the ``world`` ranks of this attempt have.
    Collective. Raises LaunchError after ``timeout``; that of rank 0 names the missing ranks, and
    ranks that still wait raise the same.

    Rank 0 posts a token and waits for an answer to it from each rank; a rank may read the token of
    an earlier attempt first, which is never confirmed after its answer.
    """
    shared, seconds = dist.PrefixStore(PREFIX, store), timeout.total_seconds()
    token = _confirm(shared, world, seconds) if rank == 0 else _answer(shared, rank, seconds)
    uncaught.attempt = token
    return dist.PrefixStore(token, shared)


def _confirm(shared: Any, world: int, seconds: float) -> str:
    """Post a token, and whether each of the other ranks has answered it."""
    token = secrets.token_hex(8)
    shared.set("token", token)
    missing = list(range(1, world))
    for over in _looks(seconds):
        if over:
            missing = [other for other in missing if not shared.check([f"{token}/{other}"])]
        if not missing or shared.check([f"{token}/{other}" for other in missing]):
            break
        if over:
            text = (
                f"rank 0 has waited {seconds:.0f} s, which is the timeout, for "
                f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}. Such a rank has "
                "ended, was not started, or does something else before init_distributed or "
                "initialize: see its output. If it is only slow, set a longer timeout in the config"
            )
            shared.set(f"{token}/all", text)
            raise LaunchError(text)
    shared.set(f"{token}/all", "")
    return token


def _answer(shared: Any, rank: int, seconds: float) -> str:
    """Answer the token of rank 0, and return it once rank 0 has confirmed it."""
    answered = set[str]()
    for over in _looks(seconds):
        token = shared.get("token").decode() if shared.check(["token"]) else ""
        confirmed = bool(token) and shared.check([f"{token}/all"])
        if confirmed and token in answered:
            text = shared.get(f"{token}/all").decode()
            if text:
                raise LaunchError(text)
            return str(token)
        if token and not confirmed and token not in answered:
            answered.add(token)
            shared.set(f"{token}/{rank}", "")
        if over:
            raise LaunchError(
                f"rank {rank} has waited {seconds:.0f} s, which is the timeout, for rank 0, which "
                "has not come, or waits for other ranks itself: see its output. If a rank is only "
                "slow, set a longer timeout in the config"
            )
    raise AssertionError("looks are endless")


def _looks(seconds: float) -> Iterator[bool]:
    """Yield before each look whether ``seconds`` have passed, and pause after it: torch prints two
    lines for each wait in the store that times out.
    """
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        yield time.monotonic() >= end
        time.sleep(pause)
        pause = min(LAST_PAUSE, 1.5 * pause)
