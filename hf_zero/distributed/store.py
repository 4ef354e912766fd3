"""The job's key-value store: calls with a time limit, roll calls, waits that name the missing
ranks, and messages between ranks.

torch's client of the store blocks in native code as long as the network lets it, whatever timeout
it was given: :class:`TimeoutStore` calls it on another thread. :class:`StoreMessages` lets
background threads of different ranks exchange results without a collective, which could match one
of the training. :class:`StoreWait` waits on the training thread, under the watchdog.

[Note: requests]
One store serves all ranks, so a rank's requests must not grow with their number. Ranks that all
enter something (:class:`RollCall`) append to one key and add to one counter: the last of them knows
that it is the last, and who is missing is one value. A wait asks again after a third of the time
it has lasted, :data:`LAST_PAUSE` at most: with the watchdog's polls that is one request a second. A
thread that waits for other ranks' requests without a limit (:class:`Bell`) is blocked in the store
and sends nothing.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.errors import HfZeroError, RankMismatchError
from hf_zero.logging import logger

TIMEOUT_SECONDS = 5.0
SLICES = 20  # parts of such a wait
FIRST_PAUSE, LAST_PAUSE = 0.0002, 5.0  # seconds between requests of a wait
PAUSE_A_RANK = 0.00005  # least first pause for each rank: all of them may ask at once
PAUSE_OF_A_WAIT = 1 / 3  # part of the time that a wait has lasted
SLICE_SECONDS, LAST_SLICE = 1.0, 10.0  # between checks for missing ranks
WARN_SECONDS = 60.0
ENDED = "destroyed its engine or ended"
STORE_SECONDS = 60.0  # after which a store that does not answer counts as gone
AT_ONCE = 32  # messages read by one request
FOREVER = timedelta(days=20)  # torch counts a wait's milliseconds in 32 bits


def next_pause(waited: float, ranks: int = 1) -> float:
    """Return the seconds until the next request of a wait that has lasted ``waited`` seconds."""
    least = max(FIRST_PAUSE, PAUSE_A_RANK * ranks)
    return min(LAST_PAUSE, max(least, PAUSE_OF_A_WAIT * waited))


class StoreSilent(RuntimeError):
    """A call that the ranks' store has not answered, and may yet: its process may be stopped."""


class TimeoutStore:
    """Calls of ``store`` for posts, all from one thread, each limited to ``seconds``: StoreSilent
    if it does not answer; another RuntimeError if it has not for ``patience`` seconds, by default
    as many, or is gone.
    """

    def __init__(
        self, store: dist.Store, seconds: float = TIMEOUT_SECONDS, patience: float | None = None
    ):
        self._store = store
        self._seconds, self._patience = seconds, seconds if patience is None else patience
        # seconds without an answer, and the end of the last call; the time for which this process
        # was stopped itself is left out
        self._silent, self._called = 0.0, 0.0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._lost = False
        self._host_is_lost: Callable[[], bool] = lambda: False
        # the thread ends with this object, unless it is blocked itself
        weakref.finalize(self, self._calls.put, None)

    def wait_for_host(self, seconds: float, is_lost: Callable[[], bool]) -> None:
        """Wait ``seconds`` more for an answer, and no longer once ``is_lost()``: heartbeats tell a
        host that is gone from one whose processes are stopped for a while.
        """
        self._seconds = self._patience = TIMEOUT_SECONDS + seconds
        self._host_is_lost = is_lost

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def append(self, key: str, value: str) -> None:
        self._ask("append", key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set ``key`` if its value is ``expected``; return its value then."""
        return bytes(self._ask("compare_set", key, expected, value))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        return bytes(self._ask("get", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of existing keys."""
        return [bytes(value) for value in self._ask("multi_get", keys)]

    def _ask(self, name: str, *args: object) -> Any:
        if self._lost:
            raise RuntimeError("the ranks' store does not answer")
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_answer,
                    args=(self._store, self._calls),
                    name="hf_zero-posts",
                    daemon=True,
                )
                self._thread.start()
        call = _Call(name, args)
        self._calls.put(call)
        seconds = self._seconds
        if self._silent:  # the thread is still in an earlier call, or has just left it
            self._silent += min(time.monotonic() - self._called, seconds)
            seconds /= SLICES
        # In slices: if another thread held the interpreter's lock for longer, or the process was
        # suspended, one slice is over at once, and the others still wait.
        for _ in range(SLICES):
            if call.done.wait(seconds / SLICES) or self._host_is_lost():
                break
        if not call.done.is_set():
            self._silent, self._called = self._silent + seconds, time.monotonic()
            self._lost = self._silent >= self._patience or self._host_is_lost()
            raise (RuntimeError if self._lost else StoreSilent)(
                f"the ranks' store has not answered for {self._silent:g} s"
            )
        self._silent = 0.0
        if call.error is not None:
            raise call.error
        return call.answer


class _Call:
    def __init__(self, name: str, args: tuple[object, ...]):
        self.name, self.args = name, args
        self.done = threading.Event()
        self.answer: object = None
        self.error: RuntimeError | None = None


def new_client(store: dist.Store) -> dist.Store:
    """Return a client of ``store`` with a connection of its own; ``store`` if that kind has none.

    Call it on the thread that uses the client: torch retries the connection for as long as the
    process group's timeout, half an hour, where the host of the store has ended.
    """
    return store.clone() if hasattr(store, "clone") else store


def _answer(store: dist.Store, calls: queue.SimpleQueue[_Call | None]) -> None:
    client: dist.Store | None = None
    while (call := calls.get()) is not None:
        try:
            if client is None:
                client = new_client(store)
            call.answer = getattr(client, call.name)(*call.args)
        except RuntimeError as error:
            call.error = error
        call.done.set()


Store = dist.Store | TimeoutStore


def append_line(store: Store, key: str, line: Sequence[object]) -> None:
    """Append ``line``, as JSON, to the list ``key``."""
    store.append(key, json.dumps(line) + "\n")  # type: ignore[union-attr]  # torch's stubs lack it


class RollCall:
    """Entries of ranks under ``key`` of ``store``; ``size`` ranks make it complete."""

    def __init__(self, store: Store, key: str, size: int):
        self._store, self._size = store, size
        self._entries, self._count = f"{key}/in", f"{key}/n"

    def enter(self, rank: int, entry: str = "") -> bool:
        """Add the entry of ``rank``; return whether the roll call is complete with it."""
        self._append(rank, entry)
        return bool(self._store.add(self._count, 1) == self._size)

    def leave(self, rank: int, complete: Callable[[], None] = lambda: None) -> bool:
        """Withdraw the entry of ``rank``; return False if the roll call is complete: it stays.

        The count alone does not tell: while another rank withdraws, or is about to stay, it is one
        short. A rank that finds the entries of all therefore counts itself again and stays; if that
        makes the roll call complete, for which the last one to enter came too early, it calls
        ``complete``.
        """
        if self._store.add(self._count, -1) == self._size - 1:
            self._store.add(self._count, 1)
            return False
        if self._size and len(self.entries()) == self._size:
            if self._store.add(self._count, 1) == self._size:
                complete()
            return False
        self._append(rank, None)
        return True

    def _append(self, rank: int, entry: str | None) -> None:
        append_line(self._store, self._entries, [rank, entry])

    def missing(self, ranks: Sequence[int], rank: int) -> list[int]:
        """Return those of ``ranks`` without an entry; if there is none, all but ``rank``, which
        asks: one of them was lost after its entry, and before it was counted.
        """
        entered = self.entries()
        late = [r for r in ranks if r not in entered]
        return late or [r for r in ranks if r != rank]

    def entered(self) -> int:
        """Return the number of entries."""
        return int(self._store.add(self._count, 0))

    def entries(self) -> dict[int, str]:
        """Return the entries so far by rank."""
        return read_entries(self._store, self._entries)

    def delete(self) -> None:
        for key in (self._entries, self._count):
            self._store.delete_key(key)


def read_entries(store: Store, key: str) -> dict[int, str]:
    """Return the last entry of each rank in the list ``key``, but for those that it withdrew."""
    if not store.check([key]):
        return {}
    entries = dict(map(json.loads, store.get(key).decode().splitlines()))
    return {rank: entry for rank, entry in entries.items() if entry is not None}


class Bell:
    """A key of this rank that other ranks set to wake its thread: :attr:`rung` is set then, until
    its reader clears it. Blocks a thread and a client of its own in the store.
    """

    def __init__(self, store: dist.Store, rank: int):
        self._key, self._ending = _bell(rank), False
        self.rung = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(store,), name="hf_zero-bell", daemon=True
        )
        self._thread.start()

    def _listen(self, store: dist.Store) -> None:
        try:
            client = new_client(store)
            while not self._ending:
                client.wait([self._key], FOREVER)
                client.delete_key(self._key)
                self.rung.set()
        except RuntimeError:
            self.rung.set()  # the store is gone, as its reader will find

    def end(self, store: dist.Store, seconds: float) -> None:
        """End the thread through ``store``, another client, and wait for it."""
        self._ending = True
        with suppress(RuntimeError):  # without a store the thread has ended or will never return
            store.set(self._key, "")
        self._thread.join(seconds)


def ring(store: dist.Store, ranks: Iterable[int]) -> None:
    """Wake the threads of ``ranks`` that wait for a :class:`Bell`."""
    keys = [_bell(rank) for rank in ranks]
    if keys:
        store.multi_set(keys, [""] * len(keys))  # type: ignore[attr-defined]


def _bell(rank: int) -> str:
    return f"bell/{rank}"


class StoreMessages:
    """Messages of one rank through ``store``. Each message on a topic replaces the last one of its
    rank, so that none accumulate.

    gone(ranks): of these, the ranks from which nothing more will come, and why; called only while a
    message is missing. timeout: seconds after which a missing message is an error.
    all_live(): whether ``gone`` would name a rank that ends, and no rank has failed so far.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        timeout: float,
        gone: Callable[[Sequence[int]], Mapping[int, str]],
        all_live: Callable[[], bool] = lambda: False,
    ):
        self._store = TimeoutStore(store, STORE_SECONDS)
        self._rank, self._timeout, self._gone = rank, timeout, gone
        self._all_live = all_live
        # starts the calling thread: none can be started once the interpreter ends
        self._store.add("opened", 1)

    def send(self, topic: str, sequence: int, message: str) -> None:
        """Publish ``message`` as this rank's ``sequence``-th on ``topic``.

        Raises RuntimeError if the store is gone.
        """
        self._store.set(f"{topic}/{self._rank}", f"{sequence}|{message}")
        self._store.add(f"{topic}/{sequence}/n", 1)

    def ask(self, topic: str, sequence: int) -> None:
        """Tell all ranks that this one waits for the items of ``topic`` up to ``sequence``.

        Raises RuntimeError if the store is gone.
        """
        # A rank that has asked for more does not ask again: a smaller number must not replace it.
        before = ""
        while not before or int(before) < sequence:
            before = self._store.compare_set(f"asked/{topic}", before, str(sequence)).decode()

    def asked(self, topic: str) -> int:
        """Return the last sequence number that any rank has asked for; 0 before the first. Raises
        RuntimeError if the store is gone.
        """
        key = f"asked/{topic}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def receive(self, topic: str, sequence: int, rank: int) -> str:
        """Return the ``sequence``-th message of ``rank``, the only rank that sends on ``topic``.
        While all ranks live, the wait has no time limit.

        Raises RankMismatchError if it will not come, RuntimeError if the store is gone.
        """
        message = self.receive_all(topic, sequence, [rank], self._all_live)[rank]
        if isinstance(message, RankMismatchError):
            raise message
        return message

    def receive_all(
        self,
        topic: str,
        sequence: int,
        ranks: Sequence[int],
        patient: Callable[[], bool] = lambda: False,
    ) -> dict[int, str | RankMismatchError]:
        """Return by rank the ``sequence``-th messages of ``ranks``, which alone send on ``topic``;
        an error in place of one that will not come. The timeout does not end the wait while
        ``patient()``.

        Raises RuntimeError if the store is gone.
        """
        missing = self._await(topic, sequence, ranks, patient)
        came = [rank for rank in ranks if rank not in missing]
        messages: dict[int, str | RankMismatchError] = {}
        for at in range(0, len(came), AT_ONCE):
            part = came[at : at + AT_ONCE]
            values = self._store.multi_get([f"{topic}/{rank}" for rank in part])
            for rank, value in zip(part, values):
                sent, _, messages[rank] = value.decode().partition("|")
                if sent != str(sequence):  # this rank was held up for longer than the others wait
                    missing[rank] = f"it has gone on, and its message {sent} has replaced this one"
        for rank, why in missing.items():
            messages[rank] = RankMismatchError(
                f"rank {rank} did not report the result of its write: {why}; its own output says "
                "more"
            )
        return messages

    def _await(
        self, topic: str, sequence: int, ranks: Sequence[int], patient: Callable[[], bool]
    ) -> dict[int, str]:
        """Wait for the messages of ``ranks``. Return those that will not come, and why."""
        late = f"no message of it for {self._timeout:g} s (the timeout of the configuration)"
        begun, gone, over = time.monotonic(), dict[int, str](), False
        while (came := self._store.add(f"{topic}/{sequence}/n", 0)) < len(ranks):
            if over or (gone and came + len(gone) >= len(ranks)):
                # not by the count alone: a rank may have ended between its message and the count
                missing = {
                    rank: gone.get(rank, late)
                    for rank in ranks
                    if not self._has_sent(topic, sequence, rank)
                }
                if over or missing.keys() <= gone.keys():
                    return missing
            waited = time.monotonic() - begun
            over = waited > self._timeout and not patient()
            gone = {**self._gone(ranks)} if waited >= SLICE_SECONDS or over else {}
            time.sleep(next_pause(waited))
        return {}

    def _has_sent(self, topic: str, sequence: int, rank: int) -> bool:
        key = f"{topic}/{rank}"
        return self._store.check([key]) and self._store.get(key).startswith(f"{sequence}|".encode())

    def forget(self, topic: str, sequence: int) -> None:
        """Delete the count of messages that no rank waits for any more.

        Raises RuntimeError if the store is gone.
        """
        self._store.delete_key(f"{topic}/{sequence}/n")


class StoreWait:
    """The waits of ``rank`` for keys of ``store``, each of ``timeout`` seconds at most."""

    def __init__(self, store: Store, rank: int, timeout: float, watchdog: Watchdog):
        self._store = store
        self._rank = rank
        self.timeout = timeout
        self._watchdog = watchdog

    def wait(
        self,
        key: str,
        missing: Callable[[], Sequence[int]],
        what: str,
        pending: PendingCollective | None = None,
    ) -> str:
        """Return the value of ``key`` once it is set; it is set when no rank is ``missing``.

        A warning each minute names the missing ranks, which are to do ``what``. Raises
        RankMismatchError if one of them has ended, at the timeout, and for what the watchdog finds.
        """
        value = self.wait_or_leave(key, missing, what, pending, may_leave=False)
        assert value is not None
        return value

    def wait_or_leave(
        self,
        key: str,
        missing: Callable[[], Sequence[int]],
        what: str,
        pending: PendingCollective | None = None,
        may_leave: bool = True,
        at_once: bool = False,
    ) -> str | None:
        """Wait like :meth:`wait`; with ``may_leave`` return None if a missing rank is
        :meth:`elsewhere`, checked after a second, or ``at_once``.
        """
        pending = pending or PendingCollective(f"ranks to {what}", warns=True)
        try:
            with self._watchdog.watching(pending):
                if not self._poll(key, missing, what, may_leave, at_once):
                    return None
        except RuntimeError as error:
            if isinstance(error, HfZeroError):
                raise
            raise self._watchdog.conclude_failure(pending, error) from error  # the store is gone
        return str(self._store.get(key).decode())

    def is_over(self, ranks: Sequence[int]) -> bool:
        """Return whether all of ``ranks`` are known to have failed, died or ended."""
        return len(self._watchdog.rank_status.exit_reasons(ranks)) == len(ranks)

    def hosts_store(self) -> bool:
        """Return whether this rank hosts the store, and no rank is known to have failed or died."""
        status = self._watchdog.rank_status
        return status.store_host == self._rank and status.all_live

    def closed(self) -> set[int]:
        """Return the ranks that no longer answer."""
        return set(read_entries(self._store, CLOSED))

    def elsewhere(self, ranks: Sequence[int]) -> set[int]:
        """Return those of ``ranks`` that cannot come before this rank goes on: they end their
        engines or their scripts, or wait in a collective that needs this rank.
        """
        gone = self.closed() | leaving(self._store, 0).entries().keys()
        others = [rank for rank in ranks if rank not in gone]
        more = self._watchdog.rank_status.elsewhere(others) if others else ()
        return {*more, *(rank for rank in ranks if rank in gone)}

    def _poll(
        self,
        key: str,
        missing: Callable[[], Sequence[int]],
        what: str,
        may_leave: bool,
        at_once: bool,
    ) -> bool:
        """Return True once ``key`` is set; False if this rank may leave and others do not come."""
        # Not store.wait(): torch prints two lines whenever it gives up.
        started = time.monotonic()
        ranks = self._watchdog.rank_status.world
        next_poll = 0.0 if may_leave and at_once else min(SLICE_SECONDS, self.timeout)
        warned = WARN_SECONDS
        while True:
            if self._store.check([key]):
                return True
            waited = time.monotonic() - started
            if waited >= next_poll:
                if may_leave and self.elsewhere([rank for rank in missing() if rank != self._rank]):
                    return False
                warned = self._report_missing(key, missing, what, waited, warned)
                next_poll = waited + min(LAST_SLICE, max(SLICE_SECONDS, waited))
            # the missing ranks are read after the first check past `next_poll`: they are not worth
            # a wakeup of their own
            until = started + min(waited + next_pause(waited, ranks), warned, self.timeout)
            next_poll = min(next_poll, warned, self.timeout)
            self._watchdog.sleep(max(0.0, until - time.monotonic()))
            self._watchdog.check()

    def _report_missing(
        self,
        key: str,
        missing: Callable[[], Sequence[int]],
        what: str,
        waited: float,
        warned: float,
    ) -> float:
        """Raise if ``key`` will never be set, warn each minute; return the time of the next
        warning, in seconds of the wait.
        """
        closed = read_entries(self._store, CLOSED)
        if not closed and waited < min(warned, self.timeout):
            return warned
        late = missing()
        gone = {rank: closed[rank] for rank in late if rank in closed}
        if gone and not self._store.check([key]):
            raise RankMismatchError(
                f"rank {self._rank} needs all ranks to {what}, but "
                f"{'; '.join(f'rank {rank} has {why}' for rank, why in gone.items())}; every rank "
                "must run the same number of forwards, and destroy or end after the last one"
            )
        text = (
            f"rank {self._rank} has waited {waited:.0f} s for ranks "
            f"{', '.join(map(str, late))} to {what}"
        )
        if waited >= self.timeout:
            raise RankMismatchError(
                f"{text}; they never came. Do all ranks call the model, "
                "state_dict and save together?"
            )
        if waited < warned:
            return warned
        logger.warning(text)
        return warned + WARN_SECONDS


CLOSED = "closed"  # list of ranks that no longer answer


def publish_closed(store: Store, rank: int, why: str = ENDED) -> None:
    """Tell ranks that wait for ``rank`` that it no longer answers, and why."""
    with suppress(RuntimeError):  # the store is gone: no rank can ask
        append_line(store, CLOSED, [rank, why])


def leaving(store: Store, size: int) -> RollCall:
    """Return the roll call of ranks that end their engines, and serve requests until then."""
    return RollCall(store, "leaving", size)
