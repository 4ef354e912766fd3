"""The ranks of one attempt under torchrun meet in a store that holds what earlier attempts left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_zero.distributed import attempts
from hf_zero.distributed.attempts import store_of_attempt

LIMIT = timedelta(seconds=60)


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setattr(attempts, "RETRY", timedelta(seconds=0.05))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT)


def meet(connect, ranks, world, begin=None):
    """The token of each of ``ranks`` that meets others; rank 0 comes once ``begin`` is set."""

    def one(rank):
        if rank == 0 and begin is not None:
            assert begin.wait(60)
        store = store_of_attempt(connect(), rank, world, LIMIT)
        store.set(f"here/{rank}", str(rank))
        store.wait([f"here/{other}" for other in range(world)], LIMIT)
        assert not store.check([f"here/{world}"])
        return store.underlying_store.get("token").decode(), store

    with ThreadPoolExecutor(len(ranks)) as threads:
        tokens = {token for token, _ in threads.map(one, ranks)}
    assert len(tokens) == 1
    return tokens


def test_attempts_one_after_another(connect):
    """On as many ranks, fewer or more; those other than rank 0 come before it and read the token
    of the attempt before.
    """
    found, worlds = set(), (4, 2, 3, 3)
    for world in worlds:
        begin = threading.Event()
        threading.Timer(0.2, begin.set).start()
        found |= meet(connect, range(world), world, begin)
    assert len(found) == len(worlds)


def test_an_attempt_that_ended_before_all_had_come(connect):
    stale = dist.PrefixStore(attempts.PREFIX, connect())
    stale.set("token", "old")
    stale.set("old/1", "")
    begin = threading.Event()
    threading.Timer(0.2, begin.set).start()
    assert meet(connect, range(3), 3, begin) != {"old"}


def test_a_token_confirmed_between_two_looks(connect, monkeypatch):
    """Another rank was late, so the wait for the confirmation ended before it came."""
    shared = dist.PrefixStore(attempts.PREFIX, connect())
    shared.set("token", "new")
    looks = 0

    def monotonic():  # read once before the first look, then after each wait that timed out
        nonlocal looks
        looks += 1
        if looks == 2:
            shared.set("new/all", "")
        assert looks < 4, "the rank takes its own attempt for an earlier one"
        return 0.0

    monkeypatch.setattr(attempts.time, "monotonic", monotonic)
    store_of_attempt(connect(), 1, 3, LIMIT).set("key", "value")
    assert shared.get("new/key") == b"value"


def test_a_rank_that_does_not_come(connect):
    for rank in (0, 1):
        with pytest.raises(dist.DistStoreError):
            store_of_attempt(connect(), rank, 2 + rank, timedelta(seconds=0.1))


def test_a_rank_0_that_does_not_come_to_the_second_attempt(connect):
    meet(connect, range(2), 2)
    with pytest.raises(dist.DistStoreError, match=r"rank 0 .* earlier attempt"):
        store_of_attempt(connect(), 1, 2, timedelta(seconds=0.1))
