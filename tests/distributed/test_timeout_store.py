"""Asking a store that may never answer."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed.store import TimeoutStore


def test_it_answers_as_the_store_does() -> None:
    store = TimeoutStore(dist.HashStore(), 60.0)
    store.set("a", "x")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"x", True, False)
    assert (store.add("n", 2), store.add("n", 1)) == (2, 3)


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


class Broken:
    def get(self, key: str) -> Any:
        raise RuntimeError("connection reset")


def test_errors_of_the_store_are_passed_on() -> None:
    store = TimeoutStore(Broken(), 60.0)
    with pytest.raises(RuntimeError, match="connection reset"):
        store.get("a")


def test_its_thread_ends_with_it() -> None:
    store = TimeoutStore(dist.HashStore(), 60.0)
    store.set("a", "x")
    thread = store._thread
    assert thread is not None
    del store
    thread.join(60)
    assert not thread.is_alive()
