"""The meeting of the ranks of one attempt of a job, in a store that may hold what earlier attempts
left: torchrun's agent keeps one store for all attempts, so each attempt gets its own prefix. Under
other launchers, rank 0 hosts the store.

No variable of torchrun tells attempts apart on all hosts: each agent counts its own restarts.

A poll is one request. The pauses between polls begin longer with more ranks, and grow with the wait
up to :data:`LAST_PAUSE`: each of 1,024 ranks sends 11 requests in the first second of a wait, then
one a second.

torch's own rendezvous limits each connection and each wait separately, and names no rank: a rank
without a store to connect to tries again for several times the timeout.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from hf_zero.distributed import uncaught
from hf_zero.distributed.store import PAUSE_A_RANK
from hf_zero.errors import LaunchError

PREFIX = "hf_zero/attempts"
FIRST_PAUSE, LAST_PAUSE = 0.005, 1.0  # seconds between polls for the other ranks
PAUSE_OF_A_WAIT = 1 / 2  # part of the time that a wait has lasted
NO_TOKEN = "-"


def wait_for_store(address: str, port: int, seconds: float) -> None:
    """Return once a program accepts connections at ``address`` and ``port``.

    Raises LaunchError if none does within ``seconds``.
    """
    end = time.monotonic() + seconds
    for over in _polls(seconds):
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


def store_of_attempt(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return ``store`` under a prefix that only the ``world`` ranks of this attempt have.
    Collective. Raises LaunchError after ``timeout``; the error of rank 0 names the missing ranks,
    and ranks that still wait raise the same error.

    Rank 0 posts a token, waits for an answer to it from each rank, and adds the outcome to its
    post. A rank may read the token of an earlier attempt first: that one has an outcome without the
    rank's answer, or never gets one.
    """
    shared, seconds = dist.PrefixStore(PREFIX, store), timeout.total_seconds()
    token = _confirm(shared, world, seconds) if rank == 0 else _answer(shared, rank, world, seconds)
    uncaught.attempt = token
    return dist.PrefixStore(token, shared)


def _confirm(shared: dist.Store, world: int, seconds: float) -> str:
    """Post a token, and whether each of the other ranks has answered it."""
    token = secrets.token_hex(8)
    shared.set("token", token)
    missing = list(range(1, world))
    for over in _polls(seconds, world):
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
            _post_outcome(shared, token, text)
            raise LaunchError(text)
    _post_outcome(shared, token, "")
    return token


def _post_outcome(shared: dist.Store, token: str, error: str) -> None:
    """Add ``error`` ("": all ranks have met) to the post of ``token``, not to a later one."""
    shared.compare_set("token", token, f"{token}|{error}")


def _answer(shared: dist.Store, rank: int, world: int, seconds: float) -> str:
    """Answer the token of rank 0, and return it once rank 0 has confirmed it."""
    answered = set[str]()
    for over in _polls(seconds, world):
        # the value of a key that may not exist, by one request that does not wait
        post = shared.compare_set("token", NO_TOKEN, NO_TOKEN).decode()
        token, has_outcome, error = post.partition("|")
        if has_outcome and token in answered:
            if error:
                raise LaunchError(error)
            return str(token)
        if token != NO_TOKEN and not has_outcome and token not in answered:
            answered.add(token)
            shared.set(f"{token}/{rank}", "")
        if over:
            raise LaunchError(
                f"rank {rank} has waited {seconds:.0f} s, which is the timeout, for rank 0, which "
                "has not come, or waits for other ranks itself: see its output. If a rank is only "
                "slow, set a longer timeout in the config"
            )
    raise AssertionError("polls are endless")


def _polls(seconds: float, world: int = 1) -> Iterator[bool]:
    """Yield before each poll of one of ``world`` ranks whether ``seconds`` have passed, and pause
    after it: torch prints two lines for each wait in the store that times out.
    """
    begun, least = time.monotonic(), max(FIRST_PAUSE, PAUSE_A_RANK * world)
    while True:
        waited = time.monotonic() - begun
        yield waited >= seconds
        time.sleep(min(LAST_PAUSE, max(least, PAUSE_OF_A_WAIT * waited), seconds - waited))
