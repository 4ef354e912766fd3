"""The store of one attempt of a job under torchrun, whose agent keeps one store for all attempts:
addresses and posts of ranks that have ended remain in it, so each attempt gets its own prefix.

No variable of torchrun tells attempts apart on all hosts: each agent counts its own restarts.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_zero.distributed import uncaught

PREFIX = "hf_zero/attempts"
RETRY = timedelta(seconds=0.5)  # until a rank looks whether rank 0 of this attempt has come


def store_of_attempt(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """Return ``store`` under a prefix that only the ``world`` ranks of this attempt have.
    Collective. Raises torch's error after ``timeout``.

    Rank 0 posts a token and waits for an answer to it from each rank; a rank may read the token of
    an earlier attempt first, which is never confirmed after its answer.
    """
    shared = dist.PrefixStore(PREFIX, store)
    if rank == 0:
        token = secrets.token_hex(8)
        shared.set("token", token)
        if world > 1:
            shared.wait([f"{token}/{other}" for other in range(1, world)], timeout)
        shared.set(f"{token}/all", "")
        uncaught.attempt = token
        return dist.PrefixStore(token, shared)
    end = time.monotonic() + timeout.total_seconds()
    answered = set[str]()
    while True:
        shared.wait(["token"], timeout)
        token = shared.get("token").decode()
        if token not in answered and not shared.check([f"{token}/all"]):
            answered.add(token)
            shared.set(f"{token}/{rank}", "")
        if token in answered:
            try:
                shared.wait([f"{token}/all"], RETRY)
                uncaught.attempt = token
                return dist.PrefixStore(token, shared)
            except dist.DistStoreError:  # timed out: of an earlier attempt, or a rank is late
                if time.monotonic() > end:
                    raise
        elif time.monotonic() > end:
            raise dist.DistStoreError(
                f"rank 0 has not come within {timeout.total_seconds():.0f} s: the store has the "
                "token of an earlier attempt alone"
            )
        else:  # confirmed without this rank: of an earlier attempt
            time.sleep(RETRY.total_seconds())
