"""The ranks of one attempt meet in a store that may hold what earlier attempts left."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_zero.distributed import attempts
from hf_zero.distributed.attempts import store_of_attempt, wait_for_store
from hf_zero.errors import LaunchError
from hf_zero.launch.hosts import free_port

LIMIT = timedelta(seconds=60)


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setattr(attempts, "LAST_PAUSE", 0.05)
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
    stale.wait(["old/1"], LIMIT)  # a set returns before the server has read it
    begin = threading.Event()
    threading.Timer(0.2, begin.set).start()
    assert meet(connect, range(3), 3, begin) != {"old"}


def test_a_token_confirmed_at_the_timeout(connect, monkeypatch):
    """Another rank was late: the confirmation comes before the last look."""
    store = connect()  # one connection, which keeps the order of writes and looks
    shared = dist.PrefixStore(attempts.PREFIX, store)
    shared.set("token", "new")

    def looks(seconds, world):
        yield False
        shared.set("token", "new|")
        yield True

    monkeypatch.setattr(attempts, "_looks", looks)
    store_of_attempt(store, 1, 3, LIMIT).set("key", "value")
    assert shared.get("new/key") == b"value"


def test_missing_ranks_are_named_on_all_ranks(connect, capfd):
    """Ranks 1 and 3 never come; rank 2 reports what rank 0 has found."""

    def error_of(rank, seconds):
        with pytest.raises(LaunchError) as caught:
            store_of_attempt(connect(), rank, 4, timedelta(seconds=seconds))
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(error_of, (0, 2), (1, 30))
    assert first == other
    assert "rank 0 has waited 1 s, which is the timeout, for ranks 1, 3. " in first
    assert "waitForInput" not in capfd.readouterr().err  # torch's lines for a wait that timed out


def test_a_rank_that_comes_as_the_time_ends_is_met(connect, monkeypatch):
    store, plain = connect(), attempts.dist.PrefixStore.check
    looks = []

    def check(shared, keys):
        looks.append(keys)
        found = plain(shared, keys)
        if len(looks) == 1:
            shared.set(keys[0], "")
        return found

    monkeypatch.setattr(attempts.dist.PrefixStore, "check", check, raising=False)
    store_of_attempt(store, 0, 2, timedelta(0))
    assert len(looks) == 2


def test_rank_0_never_comes(connect):
    with pytest.raises(
        LaunchError, match=r"rank 1 has waited 0 s.* for rank 0, which has not come"
    ):
        store_of_attempt(connect(), 1, 2, timedelta(seconds=0.1))


def test_no_program_listens(monkeypatch):
    monkeypatch.setattr(attempts, "LAST_PAUSE", 0.05)
    port = free_port()
    with pytest.raises(LaunchError, match=r"nothing has answered for 1 s.* \(Connection refused\)"):
        wait_for_store("127.0.0.1", port, 1)


def test_a_program_listens_later(monkeypatch):
    """Ranks may begin before the one that hosts the store."""
    monkeypatch.setattr(attempts, "LAST_PAUSE", 0.05)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(attempts.time, "sleep", lambda seconds: server.listen())
        wait_for_store(*server.getsockname(), 60)
