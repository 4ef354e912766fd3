"""Random delays at store operations and collectives, for ``scripts/test --stress``."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

SHARE, LONGEST = 0.2, 0.01  # share of the calls that are delayed, and seconds at most
STORES = ("TCPStore", "HashStore", "FileStore", "PrefixStore")
OPERATIONS = (
    *("set", "get", "add", "check", "wait", "append", "delete_key", "compare_set"),
    *("multi_get", "multi_set"),
)
COLLECTIVES = (
    *("all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "broadcast"),
    *("all_to_all_single", "barrier", "send", "recv", "isend", "irecv", "gather_object"),
    *("all_gather_object", "broadcast_object_list"),
)


def install() -> None:
    """Delay calls of this process at random if SUITE_STRESS has a seed. Idempotent."""
    seed = os.environ.get("SUITE_STRESS", "")
    if not seed or getattr(dist, "_hf_zero_stress", False):
        return
    dist._hf_zero_stress = True  # type: ignore[attr-defined]
    draws = random.Random(int(seed) * 1_000_003 + os.getpid())
    for store in STORES:
        for name in OPERATIONS:
            _delay(getattr(dist, store), name, draws)
    for name in COLLECTIVES:
        _delay(dist, name, draws)
        # P2POp accepts the isend and irecv of the module that defines it alone.
        setattr(dist.distributed_c10d, name, getattr(dist, name))


def _delay(owner: Any, name: str, draws: random.Random) -> None:
    call: Callable[..., Any] | None = getattr(owner, name, None)
    if call is None:
        return

    @functools.wraps(call)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        assert call is not None
        if draws.random() < SHARE:
            time.sleep(draws.random() * LONGEST)
        return call(*args, **kwargs)

    setattr(owner, name, delayed)
