"""Stores that may never answer, and words through a store: the right one of the right rank, and an
end where none will come.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

import hf_zero
from hf_zero.distributed.store import StoreMessages, TimeoutStore
from hf_zero.errors import LaunchError, RankMismatchError
from hf_zero.launch.hosts import free_port


class Silent:
    """A store behind a cable that was cut."""

    def __init__(self) -> None:
        self.watching = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.watching.wait(60)
        return True


def test_a_store_that_does_not_answer_is_given_up_once() -> None:
    silent = Silent()
    store = TimeoutStore(silent, 0.05)
    with pytest.raises(RuntimeError, match=r"has not answered for 0\.05 s"):
        store.check(["a"])
    for call in (lambda: store.set("a", "x"), lambda: store.add("n", 1), lambda: store.get("a")):
        with pytest.raises(RuntimeError, match="does not answer"):
            call()
    silent.watching.set()


class Locking:
    """It keeps the interpreter's lock for longer than an answer may take."""

    def check(self, keys: list[str]) -> bool:
        ctypes.PyDLL(None).usleep(600_000)
        return True


def test_a_process_that_stood_still_has_not_lost_its_store() -> None:
    store = TimeoutStore(Locking(), 0.5)
    assert store.check(["a"]) and store.check(["a"])


def test_a_rank_that_is_gone_is_looked_for_once_more() -> None:
    """The last message of a rank may arrive between the look into the store and the news of its
    exit.
    """
    store = dist.HashStore()
    leaving = StoreMessages(store, 1, 60.0, lambda ranks: {})

    def gone(ranks: Sequence[int]) -> dict[int, str]:
        leaving.send("wrote", 1, "done")
        return {1: "rank 1 has ended"}

    assert StoreMessages(store, 0, 60.0, gone).receive("wrote", 1, 1) == "done"
    said = "rank 1 did not report the result of its write: rank 1 has ended; its own output says"
    with pytest.raises(RankMismatchError, match=said):
        StoreMessages(store, 0, 60.0, lambda ranks: {1: "rank 1 has ended"}).receive("wrote", 2, 1)


def test_a_word_that_never_comes_is_an_error_at_the_timeout() -> None:
    said = r"rank 3 did not report .*no message of it for 0.05 s \(the timeout"
    with pytest.raises(RankMismatchError, match=said):
        StoreMessages(dist.HashStore(), 0, 0.05, lambda ranks: {}).receive("wrote", 1, 3)


class Lost:
    def add(self, key: str, amount: int) -> int:
        if key == "opened":
            return 1
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_is_told() -> None:
    with pytest.raises(RuntimeError, match="Connection reset"):
        TimeoutStore(Lost(), 60.0).add("a", 1)
    with pytest.raises(RuntimeError, match="Connection reset"):
        StoreMessages(Lost(), 0, 60.0, lambda ranks: {}).receive("wrote", 1, 1)


def test_a_store_of_the_launcher_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for the agent's store as long as for each other."""
    port = free_port()
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=f"at 127.0.0.1:{port}: nothing has answered for 1 s"):
        hf_zero.init_distributed(timeout=1.0)
    assert time.monotonic() - begun >= 1.0
